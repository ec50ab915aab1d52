//! Measures the media: `cargo run --release -p riopipe-media --example speed`.
//! `RIO_SPEED=spec;spec;…` names other drives, `RIO_SPEED_LOGS=spec;spec;…` other logs; an argument
//! (`copies`, `drives`, `model`, `logs`) selects one part. `make bench` measures the whole path
//! instead.

use riopipe_media::ssd::{self, Command, FLASH, Order};
use riopipe_media::{BLOCK_BYTES, Data, Operation, Submitted, open_drive, open_log};
use riopipe_order::region::Region;
use riopipe_platform::now_ns;

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
        let source = vec![7; 64 * BLOCK_BYTES];
        let mut state = 88_172_645_463_325_252;
        for depth in [1, 32, 128] {
            let mut queue = drive.open_queue(depth).unwrap();
            let mut done = Vec::new();
            let (start, mut count) = (now_ns(), 0u64);
            let until = start + 1_000_000_000;
            let mut time = start;
            while time < until {
                for _ in queue.in_flight()..depth {
                    let at = (count % 64) as usize * BLOCK_BYTES;
                    let data = Data::Borrowed(&source[at..at + BLOCK_BYTES]);
                    match queue.write(count, random(&mut state) % blocks, data) {
                        Submitted::Pending => {}
                        Submitted::Done(result) => drop(result.unwrap()),
                    }
                    count += 1;
                }
                queue.kick(now_ns());
                time = now_ns();
                queue.poll(time, &mut done);
                done.drain(..).for_each(|done| drop(done.result.unwrap()));
            }
            let rate = count as f64 / (now_ns() - start) as f64 * 1e6;
            println!("{spec}: depth {depth}: {rate:.0} k/s");
        }
        let mut queue = drive.open_queue(1).unwrap();
        let mut done = Vec::new();
        let (start, mut count) = (now_ns(), 0u64);
        while now_ns() < start + 1_000_000_000 {
            let _ = queue.write(0, random(&mut state) % blocks, Data::Borrowed(&source[..4096]));
            queue.kick(now_ns());
            while queue.in_flight() > 0 {
                queue.poll(now_ns(), &mut done);
            }
            let _ = queue.flush(1);
            queue.kick(now_ns());
            while queue.in_flight() > 0 {
                queue.poll(now_ns(), &mut done);
            }
            count += 1;
        }
        println!("{spec}: write, flush: {:.1} k/s", count as f64 / (now_ns() - start) as f64 * 1e6);
        drop(queue);
        if let Some(path) = spec.strip_prefix("file:") {
            drop(drive);
            std::fs::remove_file(path.split(',').next().unwrap()).unwrap();
        }
    }
}

fn what_the_model_costs() {
    let blocks = 1 << 18;
    let mut drive = ssd::in_memory(&FLASH, Order::NONE, blocks, 1, true).unwrap();
    let queue = drive.open_queue();
    let block = vec![7; BLOCK_BYTES];
    let (mut state, mut done) = (88_172_645_463_325_252, Vec::new());
    let count = 1_000_000;
    for what in ["write", "write zeroes (no copy)"] {
        let start = now_ns();
        for op in 0..count {
            let lba = random(&mut state) % blocks;
            let time = op * 2_222;
            match what {
                "write" => ssd::write(&mut drive, time, queue, op, lba, &block).unwrap(),
                _ => {
                    let what = Operation::WriteZeroes;
                    drive.submit(time, queue, op, Command::Zeroes { what, lba, blocks: 1 });
                }
            }
            drive.take_done(queue, &mut done);
            done.clear();
        }
        println!("{what}: {} ns", (now_ns() - start) / count);
    }
}

fn copies_of_cold_blocks() {
    let blocks = (1usize << 30) / BLOCK_BYTES;
    let mut memory = vec![1u8; blocks * BLOCK_BYTES];
    let source = vec![7u8; 64 * BLOCK_BYTES];
    let mut state = 88_172_645_463_325_252;
    let count = 1_000_000;
    let start = now_ns();
    for i in 0..count {
        let to = random(&mut state) as usize % blocks * BLOCK_BYTES;
        let from = i % 64 * BLOCK_BYTES;
        memory[to..to + BLOCK_BYTES].copy_from_slice(&source[from..from + BLOCK_BYTES]);
    }
    println!("ordinary copy of a cold block: {} ns", (now_ns() - start) / count as u64);
    std::hint::black_box(&memory);
}

fn log_entries() {
    const LEN: usize = 2 << 20;
    let specs = std::env::var("RIO_SPEED_LOGS").unwrap_or_else(|_| {
        "mem:2M;file:/dev/shm/rio-log-speed,size=2M;dax:/dev/shm/rio-log-speed,size=2M;\
         block:/dev/shm/rio-log-speed,size=2M;block:/var/tmp/rio-log-speed,size=2M"
            .to_owned()
    });
    for spec in specs.split(';') {
        let log = open_log(spec).unwrap();
        let mut part = log.part(0..LEN.min(log.len())).unwrap();
        // As in a partition: every block is written once before it is used.
        part.write(0, &vec![0; part.len()]);
        part.fence().unwrap();
        println!("{}", log.describe());
        for batch in [1, 16, 128] {
            let mut times = Vec::with_capacity(1 << 22);
            let (start, mut at) = (now_ns(), 0);
            let mut before = start;
            while before < start + 1_000_000_000 && times.len() < times.capacity() {
                for _ in 0..batch {
                    part.write(at % part.len(), &[7; 64]);
                    at += 64;
                }
                part.fence().unwrap();
                let after = now_ns();
                times.push(after - before);
                before = after;
            }
            let rate = (times.len() * batch) as f64 / (before - start) as f64 * 1e6;
            times.sort_unstable();
            let at = |share: f64| times[(times.len() as f64 * share) as usize] as f64 / 1000.0;
            println!(
                "  {batch} entries and a fence: median {:.2} us, 99th percentile {:.2} us; \
                 {rate:.1} k entries/s",
                at(0.5),
                at(0.99)
            );
        }
        drop((part, log));
        let path = spec.split_once(':').unwrap().1.split(',').next().unwrap();
        if spec.contains("size=") {
            std::fs::remove_file(path).unwrap();
        }
    }
}

fn main() {
    let only = std::env::args().nth(1);
    let parts: [(&str, fn()); 4] = [
        ("copies", copies_of_cold_blocks),
        ("drives", random_writes_of_4_kib),
        ("model", what_the_model_costs),
        ("logs", log_entries),
    ];
    for (name, part) in parts {
        if only.as_deref().is_none_or(|only| only == name) {
            part();
        }
    }
}
