//! What the media cost: `cargo run --release -p riopipe-media --example speed`, optionally with
//! `RIO_SPEED=spec;spec;…` for other drives. `make bench` measures the whole path instead.

use riopipe_media::ssd::{FLASH, Model};
use riopipe_media::{BLOCK_SIZE, Data, Submitted, now, open_drive, open_log};
use riopipe_order::region::Region;

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn random_writes_of_4_kib() {
    let specs = std::env::var("RIO_SPEED").unwrap_or_else(|_| {
        "mem:1G;ssd:flash,size=1G;ssd:optane,size=1G;file:/var/tmp/rio-speed,size=1G;\
         file:/var/tmp/rio-speed,size=1G,io=threads"
            .to_owned()
    });
    for spec in specs.split(';') {
        let drive = open_drive(spec).unwrap();
        let blocks = drive.geometry().blocks;
        let source = vec![7; 64 * BLOCK_SIZE];
        let mut state = 88_172_645_463_325_252;
        for depth in [1, 32, 128] {
            let mut queue = drive.open_queue(depth).unwrap();
            let mut done = Vec::new();
            let (start, mut count) = (now(), 0u64);
            let until = start + 1_000_000_000;
            let mut time = start;
            while time < until {
                for _ in queue.in_flight()..depth {
                    let at = (count % 64) as usize * BLOCK_SIZE;
                    let data = Data::Borrowed(&source[at..at + BLOCK_SIZE]);
                    match queue.write(count, random(&mut state) % blocks, data) {
                        Submitted::Pending => {}
                        Submitted::Done(result) => drop(result.unwrap()),
                    }
                    count += 1;
                }
                queue.kick();
                time = now();
                queue.poll(time, &mut done);
                done.drain(..).for_each(|done| drop(done.result.unwrap()));
            }
            let rate = count as f64 / (now() - start) as f64 * 1e6;
            println!("{spec}: depth {depth}: {rate:.0} k/s");
        }
        let mut queue = drive.open_queue(1).unwrap();
        let mut done = Vec::new();
        let (start, mut count) = (now(), 0u64);
        while now() < start + 1_000_000_000 {
            let _ = queue.write(0, random(&mut state) % blocks, Data::Borrowed(&source[..4096]));
            queue.kick();
            while queue.in_flight() > 0 {
                queue.poll(now(), &mut done);
            }
            let _ = queue.flush(1);
            queue.kick();
            while queue.in_flight() > 0 {
                queue.poll(now(), &mut done);
            }
            count += 1;
        }
        println!("{spec}: write, flush: {:.1} k/s", count as f64 / (now() - start) as f64 * 1e6);
        drop(queue);
        if let Some(path) = spec.strip_prefix("file:") {
            drop(drive);
            std::fs::remove_file(path.split(',').next().unwrap()).unwrap();
        }
    }
}

fn what_the_model_costs() {
    let blocks = 1 << 18;
    let mut drive = Model::new(&FLASH, blocks, 1, true).unwrap();
    let queue = drive.open_queue();
    let block = vec![7; BLOCK_SIZE];
    let (mut state, mut done) = (88_172_645_463_325_252, Vec::new());
    let count = 1_000_000;
    for what in ["write", "write zeroes (no copy)"] {
        let start = now();
        for op in 0..count {
            let lba = random(&mut state) % blocks;
            let time = op * 2_222;
            match what {
                "write" => drive.write(time, queue, op, lba, &block).unwrap(),
                _ => drive.write_zeroes(time, queue, op, lba, 1).unwrap(),
            }
            drive.take_done(queue, &mut done);
            done.clear();
        }
        println!("{what}: {} ns", (now() - start) / count);
    }
}

fn copies_of_cold_blocks() {
    let blocks = (1usize << 30) / BLOCK_SIZE;
    let mut memory = vec![1u8; blocks * BLOCK_SIZE];
    let source = vec![7u8; 64 * BLOCK_SIZE];
    let mut state = 88_172_645_463_325_252;
    let count = 1_000_000;
    let start = now();
    for i in 0..count {
        let to = random(&mut state) as usize % blocks * BLOCK_SIZE;
        let from = i % 64 * BLOCK_SIZE;
        memory[to..to + BLOCK_SIZE].copy_from_slice(&source[from..from + BLOCK_SIZE]);
    }
    println!("ordinary copy of a cold block: {} ns", (now() - start) / count as u64);
    std::hint::black_box(&memory);
}

fn log_entries() {
    let path = "/dev/shm/rio-log-speed";
    for spec in [format!("file:{path},size=2M"), format!("dax:{path},size=2M")] {
        let log = open_log(&spec).unwrap();
        let mut part = log.part(0..log.len()).unwrap();
        for batch in [1, 16] {
            let count = 2_000_000;
            let start = now();
            for i in 0..count {
                part.write(i * 64 % (2 << 20), &[7; 64]);
                if i % batch == 0 {
                    part.fence().unwrap();
                }
            }
            let ns = (now() - start) as f64 / count as f64;
            println!("{}: {ns:.1} ns per entry, a fence every {batch}", log.describe());
        }
    }
    std::fs::remove_file(path).unwrap();
}

fn main() {
    copies_of_cold_blocks();
    random_writes_of_4_kib();
    what_the_model_costs();
    log_entries();
}
