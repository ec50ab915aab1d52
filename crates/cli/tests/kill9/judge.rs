//! The process that judges: `kill9 judge FOLDER TAG… -- DRIVE…`.
//!
//! It reads the drives' files as they are, with a layout of its own making, and holds each block
//! against the formula. It knows nothing of logs, labels or the library.

use std::{fs::File, os::unix::fs::FileExt, path::Path, process::exit};

use crate::formula::{AREA, BLOCK, STREAMS, WINDOW, Walk, read};

/// Blocks before a member's data.
const DATA_START: u64 = 256;
/// Blocks of a stripe unit.
const UNIT: u64 = 16;

pub(crate) fn main(args: &[String]) {
    let folder = Path::new(&args[0]);
    let tags: Vec<u64> = args[1..].iter().map_while(|arg| arg.parse().ok()).collect();
    let drives: Vec<File> = args[tags.len() + 2..].iter().map(|d| File::open(d).unwrap()).collect();
    let mut acks = [0; 8 * STREAMS as usize];
    if let Ok(file) = File::open(folder.join("acks")) {
        // Shorter if a stream never confirmed anything.
        let mut at = 0;
        while let Ok(n) = file.read_at(&mut acks[at..], at as u64) {
            at += n;
            if n == 0 {
                break;
            }
        }
    }
    let mut faults = 0;
    for stream in 0..STREAMS {
        let k = tags[usize::from(stream)];
        let at = usize::from(stream) * 8;
        let acked = u64::from_le_bytes(acks[at..at + 8].try_into().unwrap());
        let mut fault = |what: String| {
            faults += 1;
            if faults < 20 {
                println!("stream {stream}, prefix {k}: {what}");
            }
        };
        if acked > k {
            fault(format!("P2: group {acked} was confirmed durable and is not in the prefix"));
        }
        judge(stream, k, &drives, &mut fault);
    }
    exit(if faults == 0 { 0 } else { 1 });
}

fn judge(stream: u16, k: u64, drives: &[File], fault: &mut dyn FnMut(String)) {
    // Who wrote each block last inside the prefix, and whether somebody beyond it may have.
    let mut inside = vec![0; AREA as usize];
    let mut beyond = vec![Vec::new(); AREA as usize];
    let (mut walk, mut writes) = (Walk::default(), Vec::new());
    while walk.n < k + WINDOW {
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
    let mut bytes = vec![0; BLOCK];
    for block in 0..AREA {
        let volume = u64::from(stream) * AREA + block;
        let (unit, within) = (volume / UNIT, volume % UNIT);
        let width = drives.len() as u64;
        let on_drive = DATA_START + unit / width * UNIT + within;
        drives[(unit % width) as usize].read_exact_at(&mut bytes, on_drive * BLOCK as u64).unwrap();
        let (want, later) = (inside[block as usize], &beyond[block as usize]);
        match read(stream, block, &bytes) {
            Err(what) => fault(format!("P5: block {block} holds {what}; it should be of {want}")),
            Ok(found) if found == want => {}
            // Undone: whatever was there before a fresh write is dispensable.
            Ok(0) if later.iter().any(|(_, in_place)| !in_place) => {}
            // In place, and beyond the prefix: left, and listed. Perhaps of an earlier life.
            Ok(found) if found > k && later.iter().any(|(_, in_place)| *in_place) => {}
            Ok(found) if found > k => {
                fault(format!("P1: block {block} shows group {found}, beyond the prefix"));
            }
            Ok(found) => fault(format!("P1, P5: block {block} is of {found}, not of {want}")),
        }
    }
}
