//! The judge's process: `kill9 judge FOLDER TAG… -- DRIVE…`.
//!
//! It reads the drives' files, with a layout of its own, and compares each block of each stream's
//! area with the formula. A block belongs to the last group of the prefix that wrote it, unless a
//! group beyond the prefix that was really begun may have written it. The judge uses no code for
//! logs or labels, and nothing of the library.
//!
//! With `CORRUPT` set to a number it reads zeroes instead of one of the blocks that no group beyond
//! the prefix wrote. So a test can show that the judge would notice.

use std::{fs::File, os::unix::fs::FileExt, path::Path, process::exit};

use crate::formula::{AREA, BLOCK, STREAMS, Walk, read};

/// Number of blocks before a member's data.
const DATA_START: u64 = 256;
/// Number of blocks of a stripe unit.
const UNIT: u64 = 16;

pub(crate) fn main(args: &[String]) {
    let folder = Path::new(&args[0]);
    let tags: Vec<u64> = args[1..].iter().map_while(|arg| arg.parse().ok()).collect();
    let drives: Vec<File> = args[tags.len() + 2..].iter().map(|d| File::open(d).unwrap()).collect();
    let (acks, begun) = (numbers(folder, "acks"), numbers(folder, "begun"));
    let corrupt = std::env::var("CORRUPT").ok().map(|n| n.parse::<u64>().unwrap());
    let (mut faults, mut strict) = (0, 0);
    for stream in 0..STREAMS {
        let k = tags[usize::from(stream)];
        let acked = acks[usize::from(stream)];
        let mut fault = |what: String| {
            faults += 1;
            if faults < 20 {
                println!("stream {stream}, prefix {k}: {what}");
            }
        };
        if acked > k {
            fault(format!("P2: group {acked} was confirmed durable and is not in the prefix"));
        }
        let begun = begun[usize::from(stream)];
        strict += judge(stream, k, begun, &drives, corrupt.filter(|_| stream == 0), &mut fault);
    }
    println!("{strict} of {} blocks admit one content only", AREA * u64::from(STREAMS));
    exit(if faults == 0 { 0 } else { 1 });
}

/// The numbers that the writers recorded for each stream; 0 without one.
fn numbers(folder: &Path, name: &str) -> [u64; STREAMS as usize] {
    // The file is missing or shorter if a stream never got that far.
    let mut bytes = std::fs::read(folder.join(name)).unwrap_or_default();
    bytes.resize(8 * usize::from(STREAMS), 0);
    std::array::from_fn(|i| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap()))
}

/// Judges the area of `stream`. Its prefix ends with group `k`, and the groups up to `begun` may
/// have been in flight. Returns the number of blocks with only one possible content.
fn judge(
    stream: u16,
    k: u64,
    begun: u64,
    drives: &[File],
    corrupt: Option<u64>,
    fault: &mut dyn FnMut(String),
) -> u64 {
    // For each block, the last group of the prefix that wrote it, and the groups beyond that may
    // have.
    let mut inside = vec![0; AREA as usize];
    let mut beyond = vec![Vec::new(); AREA as usize];
    let (mut walk, mut writes) = (Walk::default(), Vec::new());
    while walk.n < k.max(begun) {
        walk.next(stream, &mut writes);
        for write in &writes {
            for block in write.block..write.block + write.blocks {
                if walk.n <= k {
                    inside[block as usize] = walk.n;
                } else {
                    beyond[block as usize].push((walk.n, write.in_place));
                }
            }
        }
    }
    // Blocks that must have a content, and that no group beyond the prefix may have written.
    let is_strict = |block: &u64| inside[*block as usize] > 0 && beyond[*block as usize].is_empty();
    let corrupted = corrupt.and_then(|n| {
        let strict: Vec<u64> = (0..AREA).filter(is_strict).collect();
        strict.get((n % strict.len().max(1) as u64) as usize).copied()
    });
    if corrupt.is_some() && corrupted.is_none() {
        fault("there is no block to corrupt".to_owned());
    }
    let mut bytes = vec![0; BLOCK];
    for block in 0..AREA {
        let volume = u64::from(stream) * AREA + block;
        let (unit, within) = (volume / UNIT, volume % UNIT);
        let width = drives.len() as u64;
        let on_drive = DATA_START + unit / width * UNIT + within;
        drives[(unit % width) as usize].read_exact_at(&mut bytes, on_drive * BLOCK as u64).unwrap();
        if corrupted == Some(block) {
            bytes.fill(0);
        }
        let (want, later) = (inside[block as usize], &beyond[block as usize]);
        match read(stream, block, &bytes) {
            Err(what) => fault(format!("P5: block {block} holds {what}; it should be of {want}")),
            Ok(found) if found == want => {}
            // Undone: the content before a fresh write is not needed.
            Ok(0) if later.iter().any(|(_, in_place)| !in_place) => {}
            // In place, and beyond the prefix: kept, and listed. It may be from an earlier run.
            Ok(found) if later.contains(&(found, true)) => {}
            Ok(found) if found > k => {
                fault(format!("P1: block {block} shows group {found}, beyond the prefix"));
            }
            Ok(found) => fault(format!("P1, P5: block {block} is of {found}, not of {want}")),
        }
    }
    (0..AREA).filter(|block| beyond[*block as usize].is_empty()).count() as u64
}
