//! A device in normal use, with targets that come back, and with one that does not.

use std::time::{Duration, Instant};

use riopipe::{ConnectOptions, EngineKind, Volume};
use riopipe_attach::{CloseError, Device, DeviceError, DeviceOptions};
use riopipe_media::{Blocking, Drive};

use crate::site::{Host, SOON, Site, connect};

const FLASH: &str = "ssd:flash,size=24M,seed=#";

#[test]
fn it_is_a_plain_device_with_every_engine() {
    for engine in [EngineKind::Rio, EngineKind::Sync, EngineKind::Linux, EngineKind::Horae] {
        let site = Site::new(engine, FLASH, "1M");
        let device = site.open(connect());
        let mut host = Host::new(&device, 1);
        for _ in 0..300 {
            host.request();
        }
        host.check(true);
        assert!(host.flushed > 5 && host.errors == 0);
        device.close().unwrap_or_else(|error| panic!("{engine}: {error}"));
        let device = site.open(connect());
        assert!(device.acknowledged().is_empty(), "it was closed in order");
        host.go_on(&device);
        host.check(true);
        device.close().unwrap();
    }
}

/// Recovery of engine `horae` takes back updates in place that are not durable. A host that has lived on has
/// seen them complete.
#[test]
fn a_host_that_lives_on_finds_what_completed_although_its_engine_rolls_back() {
    let site = Site::new(EngineKind::Horae, FLASH, "1M");
    let mut device = site.open(connect());
    let mut host = Host::new(&device, 14);
    for _ in 0..3 {
        for _ in 0..60 {
            host.request();
        }
        host.settle();
        drop(device);
        device = site.open(connect());
        host.reconnect(&device);
        host.check(true);
    }
    device.close().unwrap();
}

/// Traps T13, T14: a full log pushes back.
#[test]
fn t13_a_small_log_makes_requests_wait_and_end() {
    let site = Site::new(EngineKind::Rio, "ssd:flash,size=16M,seed=#", "32K");
    let device = site.open(connect());
    let mut host = Host::new(&device, 2);
    for _ in 0..1500 {
        host.request();
    }
    host.check(true);
    device.close().unwrap();
}

/// Promise P7: a target's crash costs a host time, and no error.
#[test]
fn p7_a_target_that_comes_back_is_a_delay() {
    let mut site = Site::new(EngineKind::Rio, FLASH, "1M");
    let device = site.open(connect());
    let mut host = Host::new(&device, 3);
    for round in 0..4 {
        for _ in 0..60 {
            host.request();
        }
        site.kill(round % 2);
        for _ in 0..10 {
            host.request();
        }
        site.start(round % 2);
        host.check(true);
    }
    assert_eq!(host.errors, 0);
    device.close().unwrap();
}

/// Promise P6: after the first error no write and no flush is confirmed; reads go on.
#[test]
fn p6_a_target_that_is_lost_fails_the_device() {
    let mut site = Site::new(EngineKind::Rio, FLASH, "1M");
    let device =
        site.open(ConnectOptions { loss_timeout: Duration::from_millis(300), ..connect() });
    let mut host = Host::new(&device, 4);
    for _ in 0..60 {
        host.request();
    }
    host.settle();
    site.kill(1);
    let since = Instant::now();
    while device.failure().is_none() {
        host.request();
        host.poll();
        assert!(since.elapsed() < SOON, "the device does not fail");
    }
    for _ in 0..100 {
        host.request();
    }
    host.settle();
    assert!(host.errors > 0);
    let why = device.failure().expect("it has failed").to_owned();
    assert!(!why.contains("reopen"), "an operator knows no streams to reopen: {why}");
    let mut queue = Blocking::new(device.drive().as_ref()).unwrap();
    for result in [queue.flush(), queue.write(0, &[1; 4096]), queue.write_zeroes(7, 1)] {
        assert!(result.unwrap_err().to_string().contains(&why), "it has the reason");
    }
    let CloseError::Failed(reported) = device.close().unwrap_err() else { panic!("it has failed") };
    assert_eq!(reported, why);
    assert!(queue.flush().is_err() && queue.read(0, 1).is_err(), "a closed device does nothing");
}

#[test]
fn bad_operations_are_refused() {
    let site = Site::new(EngineKind::Rio, "mem:16M", "1M");
    let device = site.open(connect());
    let drive = device.drive();
    let blocks = drive.geometry().blocks;
    let mut queue = Blocking::new(drive.as_ref()).unwrap();
    assert!(queue.write(blocks, &[0; 4096]).is_err() && queue.write(0, &[0; 100]).is_err());
    assert!(queue.read(blocks - 1, 2).is_err() && queue.read(0, 0).is_err());
    assert!(queue.write_zeroes(u64::MAX, 2).is_err() && queue.deallocate(0, blocks + 1).is_err());
    queue.deallocate(0, blocks).unwrap();
    queue.flush().unwrap();
    device.close().unwrap();
}

#[test]
fn a_volume_that_makes_no_device_is_refused() {
    let site = Site::new(EngineKind::Rio, "mem:16M", "1M");
    let open = |engine| {
        let options = riopipe::OpenOptions { engine, connect: connect(), ..Default::default() };
        Volume::open("plain", site.members(), &options).unwrap().0
    };
    let refused = Device::open(open(Some(EngineKind::None)), &DeviceOptions::default());
    assert!(matches!(refused.err(), Some(DeviceError::NoOrder)));
    let options = DeviceOptions { streams: Some(4), ..DeviceOptions::default() };
    let refused = Device::open(open(None), &options);
    assert!(matches!(refused.err(), Some(DeviceError::TooFewStreams { wanted: 4, streams: 3 })));
}
