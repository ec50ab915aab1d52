//! The rate at which groups become durable through [`VolumeStorage`]: each thread submits one block
//! with a flush, as an `fsync` does, and waits.
//!
//! ```text
//! cargo run --release --example fsync_rate -- [DRIVE] [THREADS] [STREAMS] [BLOCKS]
//! ```
//!
//! The drive is `mem:256M` if none is given.

use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use riopipe::{CreateOptions, EngineKind, MemberAddr, OpenOptions, Volume};
use riopipe_fs::storage::VolumeStorage;
use riopipe_fs_core::block::{BLOCK_BYTES, BlockNo};
use riopipe_fs_core::storage::{BlockWrite, Placement, Storage, StreamNo, WriteGroup};
use riopipe_target::{Config, Target};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TIME: Duration = Duration::from_secs(3);

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let drive = args.next().unwrap_or_else(|| "mem:256M".to_owned());
    let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
    let (threads, streams, blocks) = (number(1)?, number(1)?, number(1)?);
    let log = std::env::temp_dir().join(format!("fsync-rate-{}", std::process::id()));
    let mut config = Config::on_loopback(&[&drive]);
    config.log = Some(format!("file:{},size=8M", log.display()));
    config.reactors = Some(1);
    let target = Target::start(&config)?;
    let address = target.addresses()[0];
    let members = [MemberAddr {
        host: address.ip().to_string(),
        port: address.port(),
        nqn: Some(target.subnqn().to_owned()),
        nsid: 1,
    }];
    let options = CreateOptions {
        engine: Some(EngineKind::Rio),
        force: true,
        streams: 4,
        ..CreateOptions::default()
    };
    Volume::create("rate", &members, &options)?;
    let (volume, _) = Volume::open("rate", &members, &OpenOptions::default())?;
    let storage = VolumeStorage::new(volume)?;
    let begun = Instant::now();
    let counts = thread::scope(|scope| {
        let run = |thread: u64| {
            let (storage, stream) = (&storage, StreamNo((thread % streams) as u16));
            move || -> Result<u64> {
                let data = Arc::new([thread as u8; BLOCK_BYTES]);
                let first = thread * 1024;
                let mut count = 0;
                while begun.elapsed() < TIME {
                    let write = |block| BlockWrite {
                        at: BlockNo(first + (count + block) % 1024),
                        data: Arc::clone(&data),
                        placement: Placement::InPlace,
                    };
                    let writes = (0..blocks).map(write).collect();
                    let group = WriteGroup { writes, flush: true, ..WriteGroup::default() };
                    let seq = storage.submit(stream, group)?;
                    storage.wait_durable(stream, seq)?;
                    count += 1;
                }
                Ok(count)
            }
        };
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(run(thread))).collect();
        let counts = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        counts.sum::<Result<u64>>()
    });
    let rate = counts? as f64 / begun.elapsed().as_secs_f64();
    println!("{drive}, {threads} threads, {streams} streams, {blocks} blocks: {rate:.0} a second");
    storage.close()?;
    target.stop()?;
    std::fs::remove_file(&log)?;
    Ok(())
}
