//! After any crash, the device has all that a flush or a write with FUA has confirmed.

use riopipe::{BLOCK_BYTES, EngineKind};
use riopipe_media::Blocking;

use crate::site::{Host, Site, connect};

const FLASH: &str = "ssd:flash,size=24M,seed=#";

/// The process of the device dies; the targets live on.
#[test]
fn what_was_confirmed_outlives_the_device() {
    let site = Site::new(EngineKind::Rio, FLASH, "1M");
    let mut device = site.open(connect());
    let mut host = Host::new(&device, 11);
    for round in 0..6 {
        for _ in 0..20 + 40 * round {
            host.request();
        }
        drop(device);
        device = site.open(connect());
        host.go_on(&device);
        host.check(false);
    }
    device.close().unwrap();
}

/// The process of the device dies, and its host lives on: nothing that had completed is lost, and a flush
/// covers it. Then the power is cut.
#[test]
fn a_flush_covers_what_completed_before_the_device_came_back() {
    // Opening the volume flushes the drives with their labels, also without logs.
    let barrier = "ssd:flash,size=24M,order=barrier,seed=#";
    let sites = [
        (EngineKind::Rio, FLASH, "1M"),
        (EngineKind::Sync, FLASH, ""),
        (EngineKind::Barrier, barrier, ""),
    ];
    for (engine, drive, log) in sites {
        let mut site = Site::new(engine, drive, log);
        let mut device = site.open(connect());
        let mut host = Host::new(&device, 13);
        for round in 0..4 {
            for _ in 0..60 {
                host.request();
            }
            host.settle();
            drop(device);
            device = site.open(connect());
            host.reconnect(&device);
            host.check(true);
            host.flush();
            for index in 0..2 {
                site.cut_power(index, 200 + round + index as u64);
            }
            drop(device);
            for index in 0..2 {
                site.start(index);
            }
            device = site.open(connect());
            host.go_on(&device);
            host.check(true);
        }
        device.close().unwrap();
    }
}

/// The power of everything is cut. A modelled drive then loses writes that were not flushed.
#[test]
fn what_was_confirmed_outlives_a_power_cut_of_all() {
    for engine in [EngineKind::Rio, EngineKind::Linux, EngineKind::Sync] {
        let mut site = Site::new(engine, FLASH, "1M");
        let mut device = site.open(connect());
        let mut host = Host::new(&device, 12);
        for round in 0..8 {
            for _ in 0..30 + 20 * round {
                host.request();
            }
            for index in 0..2 {
                site.cut_power(index, 100 + round + index as u64);
            }
            drop(device);
            for index in 0..2 {
                site.start(index);
            }
            device = site.open(connect());
            host.go_on(&device);
            host.check(false);
        }
        device.close().unwrap();
    }
}

/// As above, for writes of which none was flushed. The opening flushes them, with the labels.
#[test]
fn a_flush_reaches_writes_of_the_process_before() {
    let barrier = "ssd:flash,size=24M,order=barrier,seed=#";
    for (engine, drive, log) in
        [(EngineKind::Rio, "ssd:flash,size=24M,seed=#", "1M"), (EngineKind::Barrier, barrier, "")]
    {
        let mut site = Site::new(engine, drive, log);
        let device = site.open(connect());
        let mut queue = Blocking::new(device.drive().as_ref()).unwrap();
        for lba in 0..64 {
            queue.write(lba, &[lba as u8 + 1; BLOCK_BYTES]).unwrap();
        }
        drop(device);
        let device = site.open(connect());
        Blocking::new(device.drive().as_ref()).unwrap().flush().unwrap();
        for index in 0..2 {
            site.cut_power(index, 300 + index as u64);
        }
        drop(device);
        for index in 0..2 {
            site.start(index);
        }
        let device = site.open(connect());
        let mut queue = Blocking::new(device.drive().as_ref()).unwrap();
        for lba in 0..64 {
            let found = queue.read(lba, 1).unwrap();
            assert!(found[..] == [lba as u8 + 1; BLOCK_BYTES], "{engine}: block {lba}");
        }
        device.close().unwrap();
    }
}
