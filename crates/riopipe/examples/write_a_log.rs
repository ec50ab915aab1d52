//! Writes a small log to an ordered volume, and reads it back. It does not wait between records; every
//! hundredth record is a commit point, and it waits until that is durable.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M --create &
//! rio volume create logs -m 127.0.0.1:4420
//! cargo run --release --example write_a_log -- logs 127.0.0.1:4420
//! ```

use std::error::Error;

use riopipe::{BLOCK_BYTES, OpenOptions, Place, StreamOptions, Until, Volume};

const RECORDS: u64 = 1000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: write_a_log VOLUME MEMBER...")?;
    let members = args.map(|m| m.parse()).collect::<Result<Vec<_>, _>>()?;

    let (volume, recovery) = Volume::open(&name, &members, &OpenOptions::default())?;
    println!("opened {name} with engine {}; {recovery}", volume.engine());
    let mut stream = volume.stream(0, &StreamOptions::default())?;

    for number in 0..RECORDS {
        let mut record = stream.buf(BLOCK_BYTES)?;
        record.fill(0);
        record[..8].copy_from_slice(&number.to_le_bytes());
        // Blocks of a log that only grows are fresh: no state needs their old content.
        let commit = number % 100 == 99;
        let group = stream.group().write(number, record, Place::Fresh).tag(number);
        if !commit {
            // Waits only if the log or the replay memory is full.
            group.submit_or_wait(None)?;
            continue;
        }
        let seq = group.submit_durable_or_wait(None)?;
        let marks = stream.wait(Until::Durable(seq), None)?;
        println!("record {number} and all before it are durable (group {})", marks.durable);
    }

    let mut block = [0; BLOCK_BYTES];
    for number in 0..RECORDS {
        stream.read(number, &mut block, None)?;
        assert_eq!(block[..8], number.to_le_bytes(), "record {number}");
    }
    println!("{RECORDS} records read back");
    stream.close()?;
    volume.close()?;
    Ok(())
}
