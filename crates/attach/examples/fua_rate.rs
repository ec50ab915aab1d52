//! The rate of durable 4 KiB writes on a volume as a block device, over modelled drives with a cache: writes with
//! FUA, and writes that a FLUSH of their own follows, as on a device without FUA. Usage: `fua_rate [SECONDS]`.

use std::time::{Duration, Instant};

use riopipe::{BLOCK_BYTES, ConnectOptions, CreateOptions, MemberAddr, OpenOptions, Volume};
use riopipe_attach::{Device, DeviceOptions, VolumeQueue};
use riopipe_media::{AlignedBuf, BlockDevice, Data, Done, Drive, Submitted};
use riopipe_target::{Config, Target};

/// The way in which a write is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The write has FUA.
    Fua,
    /// A FLUSH follows the write.
    Flush,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).map_or(Ok(5), |seconds| seconds.parse())?;
    let folder = tempfile::tempdir()?;
    let mut targets = Vec::new();
    let mut members: Vec<MemberAddr> = Vec::new();
    for index in 0..2 {
        let mut config = Config::on_loopback(&[&format!("ssd:flash,size=256M,seed={index}")]);
        config.log = Some(format!("file:{}/log{index},size=2M", folder.path().display()));
        config.subnqn = Some(format!("nqn.2026-11.org.example:rate{index}"));
        config.reactors = Some(1);
        let running = Target::start(&config)?;
        members.push(format!("{},ns=1", running.addresses()[0]).parse()?);
        targets.push(running);
    }
    let connect = ConnectOptions { timeout: Duration::from_secs(20), ..ConnectOptions::default() };
    let create = CreateOptions { streams: 4, connect: connect.clone(), ..CreateOptions::default() };
    Volume::create("rate", &members, &create)?;
    let open = OpenOptions { connect, ..OpenOptions::default() };
    let (volume, _) = Volume::open("rate", &members, &open)?;
    let device = Device::open(volume, &DeviceOptions::default())?;
    for way in [Way::Flush, Way::Fua] {
        for depth in [1, 32] {
            let drive = device.drive();
            let mut queue = drive.queue(depth)?;
            let blocks = drive.geometry().blocks;
            let rate = rate(&mut queue, way, depth, blocks, Duration::from_secs(seconds));
            println!("{way:?}, depth {depth}: {rate:.0} durable writes/s");
        }
    }
    device.close()?;
    for target in targets {
        target.stop()?;
    }
    Ok(())
}

/// Durable writes per second.
fn rate(queue: &mut VolumeQueue, way: Way, depth: usize, blocks: u64, time: Duration) -> f64 {
    let (begun, mut done, mut next) = (Instant::now(), 0_u64, 0_u64);
    let mut results: Vec<Done> = Vec::new();
    let write = |queue: &mut VolumeQueue, op: u64| {
        // Spread over the device, and over its streams.
        let lba = op.wrapping_mul(7919) % blocks;
        let data = Data::Owned(AlignedBuf::zeroed(BLOCK_BYTES));
        let submitted = queue.write_through(2 * op, lba, data, way == Way::Fua);
        assert!(matches!(submitted, Submitted::Pending), "a write is pending");
    };
    while begun.elapsed() < time || queue.in_flight() > 0 {
        while begun.elapsed() < time && queue.in_flight() < depth {
            write(queue, next);
            next += 1;
        }
        queue.poll(0, &mut results);
        if results.is_empty() {
            std::thread::yield_now();
        }
        for Done { op, result } in results.drain(..) {
            result.expect("nothing fails");
            if way == Way::Flush && op % 2 == 0 {
                assert!(matches!(queue.flush(op + 1), Submitted::Pending), "a flush is pending");
            } else {
                done += 1;
            }
        }
    }
    done as f64 / begun.elapsed().as_secs_f64()
}
