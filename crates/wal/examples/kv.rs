//! A key-value store that survives `kill -9`. Each change is a record of a log before it takes
//! effect, and the store's content is the result of all records.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M --create &
//! rio volume create kv -m 127.0.0.1:4420
//! printf 'set a 1\nset b 2\ndel a\nget b\n' | cargo run --example kv -- kv 127.0.0.1:4420
//! ```
//!
//! It answers each line of its input: `set KEY VALUE` and `del KEY` with `ok` once the change is
//! durable, `get KEY` with the value or `none`, `keys` with their number.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Duration;

use riopipe::{MemberAddr, OpenOptions, Volume};
use riopipe_wal::{AppendError, BlockError, Lsn, OpenError, Record, Wal, WalOptions, WalPlace};

/// 4 MiB of log; a snapshot in it may take a quarter of that.
const PLACE: WalPlace = WalPlace { stream: 0, lba: 0, blocks: 1024 };

struct Store {
    wal: Wal,
    map: BTreeMap<String, String>,
    /// Number of blocks that were free after the last snapshot.
    free: u64,
}

impl Store {
    fn open(volume: &Volume, recovery: &riopipe::Recovery) -> Result<Self, Box<dyn Error>> {
        let options = WalOptions::default();
        let opened = Wal::open(volume, recovery, PLACE, &options);
        let (wal, found) = match opened {
            Ok((wal, found)) => (wal, Some(found)),
            // The first start.
            Err(OpenError::NoLog { source: BlockError::Blank, .. }) => {
                (Wal::create(volume, PLACE, &options)?, None)
            }
            // The one after a kill while the log was created. A damaged log is an error.
            Err(OpenError::CreationCut { .. }) => {
                let options = WalOptions { overwrite: true, ..options };
                (Wal::create(volume, PLACE, &options)?, None)
            }
            Err(error) => return Err(error.into()),
        };
        let mut store = Self { wal, map: BTreeMap::new(), free: 0 };
        let checkpoint = found.as_ref().and_then(|found| found.checkpoint.clone());
        let from = checkpoint.map_or(Lsn::ZERO, |checkpoint| checkpoint.lsn);
        for record in store.wal.records(from) {
            apply(&mut store.map, &record?)?;
        }
        store.free = store.wal.stat().free_blocks;
        Ok(store)
    }

    /// Makes a change durable, then visible.
    fn change(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        let lsn = match self.wal.append(line.as_bytes()) {
            Err(AppendError::LogFull { .. }) => {
                self.snapshot()?;
                self.wal.append(line.as_bytes())?
            }
            other => other?,
        };
        self.wal.wait_durable(lsn, None)?;
        change(&mut self.map, line);
        if self.wal.stat().free_blocks < self.free / 2 {
            self.snapshot()?;
        }
        Ok(())
    }

    /// Writes the whole content into the log as a checkpoint, and drops the records before it.
    fn snapshot(&mut self) -> Result<(), Box<dyn Error>> {
        let mut state = String::new();
        for (key, value) in &self.map {
            state += &format!("set {key} {value}\n");
        }
        let lsn = self.wal.checkpoint(Lsn::ZERO, state.as_bytes())?;
        self.wal.wait_durable(lsn, None)?;
        self.wal.trim(lsn)?;
        Ok(())
    }
}

/// Repeats the change of a record.
fn apply(map: &mut BTreeMap<String, String>, record: &Record) -> Result<(), Box<dyn Error>> {
    let text = std::str::from_utf8(&record.bytes)?;
    if record.checkpoint.is_some() {
        map.clear();
    }
    text.lines().for_each(|line| change(map, line));
    Ok(())
}

fn change(map: &mut BTreeMap<String, String>, line: &str) {
    let mut words = line.splitn(3, ' ');
    match (words.next(), words.next(), words.next()) {
        (Some("set"), Some(key), Some(value)) => {
            map.insert(key.to_owned(), value.to_owned());
        }
        (Some("del"), Some(key), None) => {
            map.remove(key);
        }
        _ => {}
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: kv VOLUME MEMBER...")?;
    let members = args.map(|member| member.parse()).collect::<Result<Vec<MemberAddr>, _>>()?;
    // A killed owner never comes back: its lease is not waited for.
    let options = OpenOptions {
        take_over: true,
        wait_for_lease: Duration::from_secs(60),
        ..OpenOptions::default()
    };
    let (volume, recovery) = Volume::open(&name, &members, &options)?;
    let mut store = Store::open(&volume, &recovery)?;
    let mut out = std::io::stdout();
    writeln!(out, "ready {}", store.map.len())?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = match line.split(' ').collect::<Vec<_>>()[..] {
            ["set", _, ..] | ["del", _] => {
                store.change(&line)?;
                "ok".to_owned()
            }
            ["get", key] => store.map.get(key).cloned().unwrap_or_else(|| "none".to_owned()),
            ["keys"] => store.map.len().to_string(),
            _ => "set KEY VALUE, del KEY, get KEY or keys".to_owned(),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    store.wal.close(None)?;
    volume.close()?;
    Ok(())
}
