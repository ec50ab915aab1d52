//! Engine `opimq` against a target whose drive keeps the order of epochs.

use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, EngineKind, OpenOptions, Place, Stream, StreamOptions, SubmitErrorKind, Until,
    Volume,
};
use riopipe_net::{allowed_cores, pin_to_core};
use riopipe_target::{Config, Running, Target};

use crate::site::{check, create_options, fill, members, open_options};

const SOON: Option<Duration> = Some(Duration::from_secs(60));

fn config(drive: &str) -> Config {
    let mut config = Config::on_loopback(&[drive]);
    config.subnqn = Some("nqn.2026-01.org.example:opimq".into());
    config
}

fn create(target: &Running, engine: EngineKind) -> Result<(), String> {
    let mut options = create_options();
    options.engine = Some(engine);
    let created = Volume::create("ordered", &members(&[target], 1), &options);
    created.map(drop).map_err(|error| error.to_string())
}

fn open(target: &Running) -> Volume {
    let options = OpenOptions { take_over: true, ..open_options() };
    Volume::open("ordered", &members(&[target], 1), &options).unwrap().0
}

/// The two blocks of group `version`. They are apart, so that they travel in two commands.
fn blocks_of(version: u64) -> [u64; 2] {
    [version * 4, version * 4 + 2]
}

/// Submits group `version`.
fn submit(stream: &mut Stream, version: u64) {
    loop {
        let bufs = blocks_of(version).map(|lba| {
            let mut buf = stream.buf(BLOCK_BYTES).unwrap();
            fill(&mut buf, lba, version);
            (lba, buf)
        });
        let mut group = stream.group().tag(version);
        for (lba, buf) in bufs {
            group = group.write(lba, buf, Place::Fresh);
        }
        match group.submit() {
            Ok(_) => return,
            Err(error) if matches!(error.kind, SubmitErrorKind::Full(_)) => {
                stream.wait(Until::Space, SOON).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Submits these groups, some on each core: the stream moves from core to core.
fn submit_on_all_cores(stream: &mut Stream, versions: std::ops::Range<u64>) {
    let cores = allowed_cores();
    for (part, core) in (versions.start..versions.end).step_by(5).zip(cores.iter().cycle()) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin_to_core(*core).unwrap();
                for version in part..versions.end.min(part + 5) {
                    submit(stream, version);
                    stream.send().unwrap();
                }
            });
        });
    }
}

/// How many of its two blocks hold group `version`. The others hold zeroes.
fn found(stream: &mut Stream, version: u64) -> usize {
    let mut is_there = |lba: &u64| {
        let (mut is, mut should) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
        stream.read(*lba, &mut is, None).unwrap();
        fill(&mut should, *lba, version);
        let is_there = is == should;
        assert!(is_there || is.iter().all(|byte| *byte == 0), "block {lba}");
        is_there
    };
    blocks_of(version).iter().filter(|lba| is_there(lba)).count()
}

#[test]
fn a_stream_that_moves_between_cores_leaves_a_prefix_after_a_power_cut() {
    let config = config("ssd:flash,size=16M,order=op,seed=7");
    let mut target = Target::start(&config).unwrap();
    create(&target, EngineKind::Opimq).unwrap();
    let mut first = 1;
    let mut cut_groups = 0;
    for seed in 0..6 {
        let volume = open(&target);
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        submit_on_all_cores(&mut stream, first..first + 40);
        let durable = stream.last();
        stream.wait(Until::Durable(durable), SOON).unwrap();
        // The power is cut with groups in the cache and on their way.
        submit_on_all_cores(&mut stream, first + 40..first + 100);
        let drives = target.power_cut(seed);
        drop(stream);
        drop(volume);
        target = Target::start_on(&config, &drives).unwrap();

        let volume = open(&target);
        assert_eq!(volume.engine(), EngineKind::Opimq);
        let mut stream = volume.stream(1, &StreamOptions::default()).unwrap();
        let found: Vec<usize> = (first..first + 100).map(|it| found(&mut stream, it)).collect();
        let whole = found.iter().take_while(|blocks| **blocks == 2).count();
        assert!(whole >= 40, "the groups that were durable are there: {found:?}");
        let behind = found.iter().skip(whole + 1);
        assert!(behind.clone().all(|blocks| *blocks == 0), "a prefix is there: {found:?}");
        cut_groups += behind.count();
        // The stream goes on behind it.
        check(&mut stream, blocks_of(first)[0], 1, first);
        first += 100;
    }
    assert!(cut_groups > 0, "some groups were lost");
}

#[test]
fn a_stream_that_is_opened_again_has_the_epochs_of_a_new_one() {
    let target = Target::start(&config("ssd:flash,size=16M,order=op")).unwrap();
    create(&target, EngineKind::Opimq).unwrap();
    let volume = open(&target);
    for version in 1..20 {
        let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
        submit_on_all_cores(&mut stream, version * 10..version * 10 + 8);
        let last = stream.last();
        stream.wait(Until::Durable(last), SOON).unwrap();
        // Every other time it ends without a close.
        if version % 2 == 0 {
            stream.close().unwrap();
        }
    }
}

#[test]
fn a_drive_without_the_order_is_refused() {
    for drive in ["mem:16M", "ssd:flash,size=16M", "ssd:flash,size=16M,order=barrier"] {
        let target = Target::start(&config(drive)).unwrap();
        let refused = create(&target, EngineKind::Opimq).unwrap_err();
        assert!(refused.contains("order"), "{drive}: {refused}");
    }
}
