//! A journal in a log on a volume: each line of the input becomes a record. A line is repeated on
//! the output once it is durable, so that a crash can't take it any more.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M &
//! rio volume create orders -m 127.0.0.1:4420
//! printf 'a\nb\n' | cargo run --example journal -- orders 127.0.0.1:4420
//! ```

use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};
use std::time::Duration;

use riopipe::{MemberAddr, OpenOptions, Volume};
use riopipe_wal::{BlockError, Lsn, OpenError, Wal, WalOptions, WalPlace};

/// 128 MiB of the volume, kept by stream 0.
const PLACE: WalPlace = WalPlace { stream: 0, lba: 0, blocks: 32_768 };

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: journal VOLUME MEMBER...")?;
    let members = args.map(|member| member.parse()).collect::<Result<Vec<MemberAddr>, _>>()?;
    // The journal that had the volume before was killed, and does not come back.
    let options = OpenOptions { take_over: true, ..OpenOptions::default() };
    let (volume, recovery) = Volume::open(&name, &members, &options)?;
    let wal = match Wal::open(&volume, &recovery, PLACE, &WalOptions::default()) {
        Ok((wal, _)) => wal,
        // The first start.
        Err(OpenError::NoLog { source: BlockError::Blank, .. }) => {
            Wal::create(&volume, PLACE, &WalOptions::default())?
        }
        Err(error) => return Err(error.into()),
    };

    let records = wal.records(Lsn::ZERO).collect::<Result<Vec<_>, _>>()?;
    let last = records.last().map(|record| String::from_utf8_lossy(&record.bytes).into_owned());
    eprintln!("journal: {} lines, the last: {}", records.len(), last.as_deref().unwrap_or("none"));

    for line in stdin().lock().lines() {
        let line = line?;
        // It returns at once. Records of other threads would go into the same group.
        let lsn = wal.append(line.as_bytes())?;
        wal.wait_durable(lsn, Some(Duration::from_secs(60)))?;
        writeln!(stdout(), "{line}")?;
    }
    wal.close(None)?;
    volume.close()?;
    Ok(())
}
