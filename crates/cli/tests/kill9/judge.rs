//! The process that judges: `kill9 judge FOLDER TAG… -- DRIVE…`.
//!
//! It reads the drives' files as they are, with a layout of its own making, and holds each block of
//! each stream's area against the formula: it is of the last group within the prefix that wrote it, unless a
//! group beyond the prefix that was really begun may have had it. It knows nothing of logs, labels
//! or the library.
//!
//! With `SPOIL` set to a number it reads zeroes instead of one of the blocks that no group beyond the
//! prefix was to write, to show that it would notice.

use std::{fs::File, os::unix::fs::FileExt, path::Path, process::exit};

use crate::formula::{AREA, BLOCK, STREAMS, Walk, read};

/// Blocks before a member's data.
const DATA_START: u64 = 256;
/// Blocks of a stripe unit.
const UNIT: u64 = 16;

pub(crate) fn main(args: &[String]) {
    let folder = Path::new(&args[0]);
    let tags: Vec<u64> = args[1..].iter().map_while(|arg| arg.parse().ok()).collect();
    let drives: Vec<File> = args[tags.len() + 2..].iter().map(|d| File::open(d).unwrap()).collect();
    let (acks, begun) = (numbers(folder, "acks"), numbers(folder, "begun"));
    let spoil = std::env::var("SPOIL").ok().map(|n| n.parse::<u64>().unwrap());
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
        strict += judge(stream, k, begun, &drives, spoil.filter(|_| stream == 0), &mut fault);
    }
    println!("{strict} of {} blocks admit one content only", AREA * u64::from(STREAMS));
    exit(if faults == 0 { 0 } else { 1 });
}

/// What the writers noted of each stream; 0 where nothing.
fn numbers(folder: &Path, name: &str) -> [u64; STREAMS as usize] {
    // Not there, or shorter, if a stream never got so far.
    let mut bytes = std::fs::read(folder.join(name)).unwrap_or_default();
    bytes.resize(8 * usize::from(STREAMS), 0);
    std::array::from_fn(|i| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap()))
}

/// Judges the area of `stream`, whose prefix ends with group `k` and of which the groups up to `begun`
/// may have been on their way. Answers how many of its blocks admit one content only.
fn judge(
    stream: u16,
    k: u64,
    begun: u64,
    drives: &[File],
    spoil: Option<u64>,
    fault: &mut dyn FnMut(String),
) -> u64 {
    // Who wrote each block last inside the prefix, and whether somebody beyond it may have.
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
    // Blocks that are to hold something, and that nobody beyond the prefix may have touched.
    let is_strict = |block: &u64| inside[*block as usize] > 0 && beyond[*block as usize].is_empty();
    let spoiled = spoil.and_then(|n| {
        let strict: Vec<u64> = (0..AREA).filter(is_strict).collect();
        strict.get((n % strict.len().max(1) as u64) as usize).copied()
    });
    if spoil.is_some() && spoiled.is_none() {
        fault("there is no block to spoil".to_owned());
    }
    let mut bytes = vec![0; BLOCK];
    for block in 0..AREA {
        let volume = u64::from(stream) * AREA + block;
        let (unit, within) = (volume / UNIT, volume % UNIT);
        let width = drives.len() as u64;
        let on_drive = DATA_START + unit / width * UNIT + within;
        drives[(unit % width) as usize].read_exact_at(&mut bytes, on_drive * BLOCK as u64).unwrap();
        if spoiled == Some(block) {
            bytes.fill(0);
        }
        let (want, later) = (inside[block as usize], &beyond[block as usize]);
        match read(stream, block, &bytes) {
            Err(what) => fault(format!("P5: block {block} holds {what}; it should be of {want}")),
            Ok(found) if found == want => {}
            // Undone: whatever was there before a fresh write is dispensable.
            Ok(0) if later.iter().any(|(_, in_place)| !in_place) => {}
            // In place, and beyond the prefix: left, and listed. Perhaps of an earlier life.
            Ok(found) if later.contains(&(found, true)) => {}
            Ok(found) if found > k => {
                fault(format!("P1: block {block} shows group {found}, beyond the prefix"));
            }
            Ok(found) => fault(format!("P1, P5: block {block} is of {found}, not of {want}")),
        }
    }
    (0..AREA).filter(|block| beyond[*block as usize].is_empty()).count() as u64
}
