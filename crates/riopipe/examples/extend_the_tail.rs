//! A log of small records on an ordered volume, whose last block is written again with each record.
//!
//! The first record of a block is written as [`Place::Fresh`], each further one as [`Place::Extend`]:
//! the new content of the block begins with the old. So after a crash the block is not zeroed, and
//! needs no acknowledgement. It may hold records beyond the prefix. The tag that recovery returns is
//! the number of the last record that counts. The first group after that removes the others.
//!
//! ```text
//! rio target serve -a 127.0.0.1 -s 4420 --drive mem:64M --log file:/tmp/rio.log,size=2M --create &
//! rio volume create logs -m 127.0.0.1:4420
//! cargo run --release --example extend_the_tail -- logs 127.0.0.1:4420
//! ```

use std::error::Error;

use riopipe::{
    EngineKind, OpenOptions, Place, Stream, StreamOptions, SubmitError, SubmitErrorKind, Until,
    Volume,
};

const RECORDS: u64 = 1000;
const BLOCK: usize = 4096;
/// Bytes of a record: its number, a checksum, its text.
const RECORD: usize = 64;
const PER_BLOCK: u64 = (BLOCK / RECORD) as u64;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next().ok_or("usage: extend_the_tail VOLUME MEMBER...")?;
    let members = args.map(|m| m.parse()).collect::<Result<Vec<_>, _>>()?;

    let (volume, recovery) = Volume::open(&name, &members, &OpenOptions::default())?;
    println!("opened {name} with engine {}; {recovery}", volume.engine());
    if volume.engine() != EngineKind::Rio {
        return Err("only engine rio recovers the number of the last record".into());
    }
    let mut stream = volume.stream(0, &StreamOptions::default())?;
    // Each group has the number of its last record as its tag.
    let last = recovery.stream(0).map_or(0, |found| found.tag);
    println!("the log has {last} records");
    let mut tail = read_tail(&mut stream, last)?;
    if !last.is_multiple_of(PER_BLOCK) {
        // Records that do not count are removed before their numbers are used again.
        write_tail(&mut stream, &tail, last, Place::Extend, false)?;
    }

    for number in last + 1..=last + RECORDS {
        let at = slot(number) * RECORD;
        if at == 0 {
            tail.fill(0);
        }
        tail[at..at + RECORD].copy_from_slice(&record(number));
        let place = if at == 0 { Place::Fresh } else { Place::Extend };
        let commit = number.is_multiple_of(100);
        write_tail(&mut stream, &tail, number, place, commit)?;
    }
    for number in 1..=last + RECORDS {
        let mut block = [0; BLOCK];
        stream.read(block_of(number), &mut block, None)?;
        let at = slot(number) * RECORD;
        assert_eq!(block[at..at + RECORD], record(number), "record {number}");
    }
    println!("{} records read back", last + RECORDS);
    stream.close()?;
    volume.close()?;
    Ok(())
}

/// The block of a record; records count from 1.
fn block_of(number: u64) -> u64 {
    (number - 1) / PER_BLOCK
}

/// The place of a record in its block.
fn slot(number: u64) -> usize {
    ((number - 1) % PER_BLOCK) as usize
}

/// A record as it lies in its block.
fn record(number: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..8].copy_from_slice(&number.to_le_bytes());
    let text = format!("this is record {number}");
    record[16..16 + text.len()].copy_from_slice(text.as_bytes());
    let check = checksum(&record);
    record[8..16].copy_from_slice(&check.to_le_bytes());
    record
}

/// FNV-1a, over all but the checksum itself.
fn checksum(record: &[u8; RECORD]) -> u64 {
    let covered = record[..8].iter().chain(&record[16..]);
    covered.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The last block as far as its records count: up to number `last`.
fn read_tail(stream: &mut Stream, last: u64) -> Result<[u8; BLOCK], Box<dyn Error>> {
    let mut tail = [0; BLOCK];
    if last.is_multiple_of(PER_BLOCK) {
        return Ok(tail);
    }
    stream.read(block_of(last), &mut tail, None)?;
    let (counts, rest) = tail.split_at_mut((slot(last) + 1) * RECORD);
    let first = last - slot(last) as u64;
    for (number, found) in (first..).zip(counts.chunks(RECORD)) {
        if found != record(number) {
            return Err(format!("record {number} has changed since it was written").into());
        }
    }
    if rest.iter().any(|byte| *byte != 0) {
        println!("a record beyond the prefix is dropped");
    }
    rest.fill(0);
    Ok(tail)
}

/// Writes the last block, which ends with record `number`; waits until it is durable if it is a
/// commit.
fn write_tail(
    stream: &mut Stream,
    tail: &[u8; BLOCK],
    number: u64,
    place: Place,
    commit: bool,
) -> Result<(), Box<dyn Error>> {
    loop {
        let mut block = stream.buf(BLOCK)?;
        block.copy_from_slice(tail);
        let group = stream.group().write(block_of(number), block, place).tag(number);
        match if commit { group.submit_durable() } else { group.submit() } {
            Ok(seq) if commit => {
                stream.wait(Until::Durable(seq), None)?;
                println!("record {number} and all before it are durable");
                return Ok(());
            }
            Ok(_) => return Ok(()),
            // The log or the replay memory is full: no write was admitted, try again.
            Err(SubmitError { kind: SubmitErrorKind::Full(_), .. }) => {
                stream.wait(Until::Space, None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
}
