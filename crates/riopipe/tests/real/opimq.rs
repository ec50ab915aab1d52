//! Engine `opimq` against a target whose drive keeps the order of epochs.

use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, EngineKind, OpenOptions, Place, Stream, StreamId, StreamOptions, SubmitErrorKind,
    Until, Volume,
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

/// The two data streams of the tests with a journal, and the journal.
const DATA: [u16; 2] = [0, 1];
const JOURNAL: u16 = 2;

/// The two blocks of group `version` of a data stream.
fn data_blocks(stream: u16, version: u64) -> [u64; 2] {
    blocks_of(version).map(|lba| u64::from(stream) * 1000 + lba)
}

/// The block of the journal's record of that group.
fn record_of(stream: u16, version: u64) -> u64 {
    2000 + u64::from(stream) * 300 + version
}

/// Submits group `version` of a data stream. The journal follows it.
fn submit_followed(stream: &mut Stream, version: u64) -> riopipe::Seq {
    let id = stream.id().0;
    let bufs = data_blocks(id, version).map(|lba| {
        let mut buf = stream.buf(BLOCK_BYTES).unwrap();
        fill(&mut buf, lba, version);
        (lba, buf)
    });
    let mut group = stream.group().tag(version).follower(StreamId(JOURNAL));
    for (lba, buf) in bufs {
        group = group.write(lba, buf, Place::Fresh);
    }
    group.submit_or_wait(SOON).unwrap()
}

/// Writes the journal's record of a group.
fn record(journal: &mut Stream, stream: u16, version: u64, durable: bool) {
    let lba = record_of(stream, version);
    let mut buf = journal.buf(BLOCK_BYTES).unwrap();
    fill(&mut buf, lba, version);
    let group = journal.group().write(lba, buf, Place::Fresh);
    match durable {
        true => group.submit_durable_or_wait(SOON).unwrap(),
        false => group.submit_or_wait(SOON).unwrap(),
    };
}

/// Whether a block holds `version`. It holds zeroes otherwise.
fn holds(stream: &mut Stream, lba: u64, version: u64) -> bool {
    let (mut is, mut should) = (vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]);
    stream.read(lba, &mut is, None).unwrap();
    fill(&mut should, lba, version);
    assert!(is == should || is.iter().all(|byte| *byte == 0), "block {lba}");
    is == should
}

/// Two data streams and a journal, which the drive knows: it can keep the order.
fn open_with_journal(volume: &Volume, version: u64) -> ([Stream; 2], Stream) {
    let mut journal = volume.stream(JOURNAL, &StreamOptions::default()).unwrap();
    record(&mut journal, 2, version, true);
    journal.wait(Until::Durable(journal.last()), SOON).unwrap();
    (DATA.map(|id| volume.stream(id, &StreamOptions::default()).unwrap()), journal)
}

/// Two threads write data. A third one writes a record of each of their groups when it has been
/// submitted, and does not wait for it. With `durable` every tenth record is durable, and these are
/// returned.
fn write_with_journal(
    data: &mut [Stream; 2],
    journal: &mut Stream,
    versions: std::ops::Range<u64>,
    durable: bool,
) -> Vec<(u16, u64)> {
    let (records, submitted) = std::sync::mpsc::channel();
    let mut found = Vec::new();
    std::thread::scope(|scope| {
        for stream in data {
            let (records, versions) = (records.clone(), versions.clone());
            scope.spawn(move || {
                for version in versions {
                    submit_followed(stream, version);
                    records.send((stream.id().0, version)).unwrap();
                }
            });
        }
        drop(records);
        for (count, (stream, version)) in submitted.iter().enumerate() {
            let is_durable = durable && count % 10 == 9;
            record(journal, stream, version, is_durable);
            if is_durable {
                journal.wait(Until::Durable(journal.last()), SOON).unwrap();
                found.push((stream, version));
            }
        }
        journal.send().unwrap();
    });
    found
}

#[test]
fn a_record_of_another_stream_survives_a_power_cut_only_with_the_data_that_it_follows() {
    let config = config("ssd:flash,size=16M,order=op,seed=9");
    let mut target = Target::start(&config).unwrap();
    create(&target, EngineKind::Opimq).unwrap();
    let (mut first, mut lost) = (1, 0);
    for seed in 0..4 {
        let volume = open(&target);
        let versions = first..first + 60;
        let (mut data, mut journal) = open_with_journal(&volume, first);
        let durable = write_with_journal(&mut data, &mut journal, first..first + 30, true);
        write_with_journal(&mut data, &mut journal, first + 30..first + 60, false);
        // The power is cut with groups in the cache and on their way.
        let drives = target.power_cut(seed);
        drop((data, journal));
        drop(volume);
        target = Target::start_on(&config, &drives).unwrap();

        let volume = open(&target);
        let mut stream = volume.stream(3, &StreamOptions::default()).unwrap();
        for id in DATA {
            let there: Vec<bool> = versions
                .clone()
                .map(|version| data_blocks(id, version).map(|lba| holds(&mut stream, lba, version)))
                .map(|blocks| blocks == [true; 2])
                .collect();
            let whole = there.iter().take_while(|there| **there).count() as u64;
            assert!(there.iter().skip(whole as usize).all(|there| !there), "a prefix: {there:?}");
            let last = versions.clone().filter(|v| holds(&mut stream, record_of(id, *v), *v)).max();
            let last = last.map_or(0, |last| last + 1 - first);
            assert!(last <= whole, "stream {id}: {last} records, {whole} groups");
            let due = durable.iter().filter(|(of, _)| *of == id).map(|(_, v)| v + 1 - first).max();
            assert!(due.is_none_or(|due| last >= due), "stream {id}: {due:?} were durable");
            lost += 60 - whole;
        }
        first += 60;
    }
    assert!(lost > 0, "some groups were lost");
}

#[test]
fn a_follower_that_must_wait_goes_on_when_the_group_is_durable() {
    for (drive, engine) in [
        ("ssd:flash,size=16M", EngineKind::Sync),
        ("ssd:flash,size=16M", EngineKind::Linux),
        ("ssd:flash,size=16M,order=op", EngineKind::Opimq),
    ] {
        let target = Target::start(&config(drive)).unwrap();
        create(&target, engine).unwrap();
        let volume = open(&target);
        let mut data = volume.stream(0, &StreamOptions::default()).unwrap();
        let mut journal = volume.stream(JOURNAL, &StreamOptions::default()).unwrap();
        for version in 1..20 {
            // With `opimq` the drive does not know the journal yet, at first.
            let seq = submit_followed(&mut data, version);
            std::thread::scope(|scope| {
                // The group becomes durable although its thread only waits.
                scope.spawn(|| data.wait(Until::Durable(seq), SOON).unwrap());
                record(&mut journal, 0, version, false);
            });
        }
        // No thread waits: the background thread makes the group durable.
        submit_followed(&mut data, 20);
        record(&mut journal, 0, 20, true);
        data.close().unwrap();
        journal.close().unwrap();
    }
}

#[test]
fn a_stream_that_is_not_open_cannot_follow() {
    let target = Target::start(&config("ssd:flash,size=16M")).unwrap();
    create(&target, EngineKind::Sync).unwrap();
    let volume = open(&target);
    let mut data = volume.stream(0, &StreamOptions::default()).unwrap();
    for id in [JOURNAL, 0] {
        let buf = data.buf(BLOCK_BYTES).unwrap();
        let group = data.group().write(8, buf, Place::Fresh).follower(StreamId(id));
        let error = group.submit().unwrap_err();
        assert_eq!(error.kind, SubmitErrorKind::NoFollower { stream: StreamId(id) });
        assert!(!error.kind.is_retryable() && error.bufs.len() == 1);
    }
    let mut journal = volume.stream(JOURNAL, &StreamOptions::default()).unwrap();
    submit_followed(&mut data, 1);
    record(&mut journal, 0, 1, true);
    journal.close().unwrap();
    let buf = data.buf(BLOCK_BYTES).unwrap();
    let group = data.group().write(8, buf, Place::Fresh).follower(StreamId(JOURNAL));
    assert!(!group.submit().unwrap_err().kind.is_retryable(), "it is closed");
}
