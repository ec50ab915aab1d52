//! Volumes against real targets on real sockets: ordinary use, and uses that must be refused.

use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, CreateOptions, EngineKind, MemberAddr, OpenOptions, Place, Seq, StreamOptions,
    SubmitError, SubmitErrorKind, Until, Volume, WaitError,
};
use tempfile::TempDir;

use crate::crash::impatient;
use crate::site::{check, connect, create_options, fill, members, open_options, target, write};

#[test]
fn an_ordered_write_end_to_end_on_two_striped_targets() {
    let logs = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let targets = [
        target(&["mem:32M", "mem:32M"], Some(&logs[0])),
        target(&["ssd:flash,size=32M", "ssd:flash,size=32M"], Some(&logs[1])),
    ];
    let members = members(&[&targets[0], &targets[1]], 2);
    let info = Volume::create("v", &members, &create_options()).unwrap();
    assert_eq!((info.engine, info.members.len()), (EngineKind::Rio, 4));
    assert!(info.members.iter().all(|m| m.owner.is_none() && m.log == "file" && m.slots > 0));

    for (round, engine) in [EngineKind::Rio, EngineKind::Sync, EngineKind::None, EngineKind::Rio]
        .into_iter()
        .enumerate()
    {
        let options = OpenOptions { engine: Some(engine), ..open_options() };
        let (volume, recovery) = Volume::open("v", &members, &options).unwrap();
        assert_eq!(volume.engine(), engine);
        assert_eq!(recovery.fallback, None);
        let mut streams: Vec<_> =
            (0..2).map(|id| volume.stream(id, &StreamOptions::default()).unwrap()).collect();
        for step in 0..60u64 {
            for (id, stream) in streams.iter_mut().enumerate() {
                let base = id as u64 * 2000;
                // Straddles stripe units, so most are split.
                write(
                    stream,
                    base + step * 7,
                    5 + step as usize % 40,
                    round as u64 * 1000 + step,
                    false,
                );
                if engine == EngineKind::None {
                    // This engine keeps no order, not even of overlapping writes in flight.
                    stream.wait(Until::Idle, Some(Duration::from_secs(20))).unwrap();
                }
            }
        }
        for (id, stream) in streams.iter_mut().enumerate() {
            let base = id as u64 * 2000;
            check(stream, base + 59 * 7, 5 + 59 % 40, round as u64 * 1000 + 59);
            let seq = write(stream, base + 1900, 1, 7, true);
            let marks = stream.wait(Until::Durable(seq), Some(Duration::from_secs(20))).unwrap();
            assert!(marks.durable >= seq && marks.complete >= seq);
            assert_eq!(stream.watch().marks(), marks);
        }
        for stream in streams {
            stream.close().unwrap();
        }
        volume.close().unwrap();
    }
    // Seqs continue after those of the last owner with engine rio.
    let (volume, recovery) = Volume::open("v", &members, &open_options()).unwrap();
    assert!(recovery.streams[0].last > Seq(100), "{recovery:?}");
    volume.close().unwrap();
    for target in targets {
        target.stop().unwrap();
    }
}

#[test]
fn p5_random_writes_read_back_exactly_also_in_flight() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M", "mem:16M"], Some(&log));
    let members = members(&[&target], 2);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut model = vec![None; 400];
    let mut state = 0x1234_5678_u64;
    let mut random = move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for version in 1..1500u64 {
        let (lba, blocks) = (random() % 360, 1 + random() as usize % 40);
        write(&mut stream, lba, blocks, version, random() % 50 == 0);
        for (i, at) in (lba..lba + blocks as u64).enumerate() {
            model[at as usize] = Some((version, lba, i));
        }
        if random() % 5 == 0 {
            let at = random() % 400;
            let mut is = vec![0; BLOCK_BYTES];
            stream.read(at, &mut is, None).unwrap();
            let mut should = vec![0; BLOCK_BYTES];
            if let Some((version, lba, i)) = model[at as usize] {
                let mut whole = vec![0; (i + 1) * BLOCK_BYTES];
                fill(&mut whole, lba, version);
                should.copy_from_slice(&whole[i * BLOCK_BYTES..]);
            }
            assert!(is == should, "block {at} after write {version} (P5, P9)");
        }
    }
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

#[test]
fn t13_a_tiny_log_never_stops_the_stream_for_good() {
    let log = TempDir::new().unwrap();
    let target = target(&["ssd:flash,size=16M"], Some(&log));
    let members = members(&[&target], 1);
    let options = CreateOptions { slots: 16, streams: 2, ..create_options() };
    let info = Volume::create("v", &members, &options).unwrap();
    assert_eq!(info.members[0].slots, 16);
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let options = StreamOptions { merge: false, ..StreamOptions::default() };
    let mut stream = volume.stream(1, &options).unwrap();
    for step in 0..400 {
        write(&mut stream, step * 2, 1, step, false);
    }
    let mut bufs: Vec<_> = (0..20).map(|_| stream.buf(BLOCK_BYTES).unwrap()).collect();
    let mut group = stream.group();
    for (i, buf) in bufs.drain(..).enumerate() {
        group = group.write(1000 + 2 * i as u64, buf, Place::Fresh);
    }
    let SubmitError { kind, bufs } = group.submit().unwrap_err();
    assert!(matches!(kind, SubmitErrorKind::TooLarge(_)), "{kind}");
    assert_eq!(bufs.len(), 20, "the error has the buffers");
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

/// A full log refuses a group after the engine has taken its payload. The group that waited must
/// bring the payload all the same.
#[test]
fn t13_a_group_that_waits_for_the_log_brings_its_payload() {
    let log = TempDir::new().unwrap();
    let target = target(&["ssd:flash,size=16M", "ssd:flash,size=16M"], Some(&log));
    let members = members(&[&target], 2);
    let options = CreateOptions { slots: 16, streams: 2, ..create_options() };
    Volume::create("v", &members, &options).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let options = StreamOptions { merge: false, ..StreamOptions::default() };
    let mut stream = volume.stream(1, &options).unwrap();
    for step in 0..400 {
        // Two writes: one whole, and one that is split over both drives.
        let mut bufs = [1, 4].map(|blocks| stream.buf(blocks * BLOCK_BYTES).unwrap()).into_iter();
        let mut group = stream.group();
        for at in [0, 2] {
            let mut buf = bufs.next().expect("two");
            fill(&mut buf, 8 * step + at, step);
            group = group.write(8 * step + at, buf, Place::Fresh);
        }
        match step % 3 {
            0 => group.submit_durable_or_wait(Some(Duration::from_secs(60))).unwrap(),
            _ => group.submit_or_wait(None).unwrap(),
        };
    }
    stream.wait(Until::Complete(stream.last()), Some(Duration::from_secs(60))).unwrap();
    for step in 0..400 {
        check(&mut stream, 8 * step, 1, step);
        check(&mut stream, 8 * step + 2, 4, step);
    }
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

#[test]
fn t14_the_bound_on_kept_memory_pushes_back() {
    let log = TempDir::new().unwrap();
    let target = target(&["ssd:flash,size=16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let options =
        StreamOptions { kept_bytes_max: 8 * BLOCK_BYTES as u64, ..StreamOptions::default() };
    let mut stream = volume.stream(0, &options).unwrap();
    let mut full = 0;
    for step in 0..100 {
        let buf = stream.buf(BLOCK_BYTES).unwrap();
        match stream.group().write(step, buf, Place::Fresh).submit() {
            Ok(_) => {}
            Err(SubmitError { kind: SubmitErrorKind::Full(_), bufs }) => {
                full += 1;
                assert_eq!(bufs.len(), 1);
                stream.wait(Until::Space, Some(Duration::from_secs(20))).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(full > 0, "eight blocks are soon full");
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

#[test]
fn t8_a_second_owner_is_refused_and_take_over_fences_the_first() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (first, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = first.stream(0, &StreamOptions::default()).unwrap();
    let seq = write(&mut stream, 0, 1, 1, true);
    stream.wait(Until::Durable(seq), None).unwrap();
    // Everything is durable, delivered and released.
    stream.close().unwrap();
    let mut stream = first.stream(0, &StreamOptions::default()).unwrap();

    let error = Volume::open("v", &members, &open_options()).unwrap_err();
    assert!(error.to_string().contains("take_over"), "{error}");
    let info = Volume::inspect(&members, &connect()).unwrap();
    assert!(info.members[0].owner.is_some());

    let options = OpenOptions { take_over: true, ..open_options() };
    let (second, _) = Volume::open("v", &members, &options).unwrap();
    let buf = stream.buf(BLOCK_BYTES).unwrap();
    let seq = stream.group().write(9, buf, Place::Fresh).submit();
    if let Ok(seq) = seq {
        let error = stream.wait(Until::Complete(seq), Some(Duration::from_secs(20))).unwrap_err();
        assert!(matches!(error, WaitError::Failed(_)), "{error}");
    }
    let mut stream = second.stream(0, &StreamOptions::default()).unwrap();
    check(&mut stream, 0, 1, 1);
    let mut block = vec![1; BLOCK_BYTES];
    stream.read(9, &mut block, None).unwrap();
    assert!(block.iter().all(|b| *b == 0), "the fenced owner's write never reached the drive");
    stream.close().unwrap();
    second.close().unwrap();
    target.stop().unwrap();
}

/// A claim waits for connections on other reactors. A lost wake-up would stall it.
#[test]
fn p8_claiming_and_releasing_over_and_over_never_stalls() {
    let log = TempDir::new().unwrap();
    let target = target(&["ssd:flash,size=16M"], Some(&log));
    let members = members(&[&target], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    for round in 0..150 {
        let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
        if round % 3 == 0 {
            volume.stream(0, &StreamOptions::default()).unwrap().close().unwrap();
        }
        volume.close().unwrap();
    }
    target.stop().unwrap();
}

#[test]
fn p6_a_lost_target_poisons_its_streams_with_one_clear_error() {
    let logs = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let targets = [target(&["mem:16M"], Some(&logs[0])), target(&["mem:16M"], Some(&logs[1]))];
    let members = members(&[&targets[0], &targets[1]], 1);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &impatient()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    let before = write(&mut stream, 0, 40, 1, true);
    stream.wait(Until::Durable(before), None).unwrap();
    let [one, two] = targets;
    two.stop().unwrap();
    let error = loop {
        let buf = stream.buf(40 * BLOCK_BYTES).unwrap();
        if let Err(error) = stream.group().write(0, buf, Place::InPlace).submit() {
            match error.kind {
                SubmitErrorKind::Poisoned(failure) => break failure,
                SubmitErrorKind::Full(_) => {}
                other => panic!("{other}"),
            }
        }
        if let Err(WaitError::Failed(failure)) =
            stream.wait(Until::Idle, Some(Duration::from_secs(20)))
        {
            break failure;
        }
    };
    let text = error.to_string();
    assert!(
        text.contains("stream 0 of volume \"v\"") && text.contains(&members[1].port.to_string()),
        "{text}"
    );
    assert!(error.seq > before);
    assert_eq!(stream.poll().unwrap_err(), error, "the same error, each time");
    one.stop().unwrap();
}

#[test]
fn t19_t20_members_must_be_all_there_and_in_order() {
    let logs = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let targets =
        [target(&["mem:16M", "mem:16M"], Some(&logs[0])), target(&["mem:16M"], Some(&logs[1]))];
    let all = members(&[&targets[0]], 2);
    let other = members(&[&targets[1]], 1);
    Volume::create("v", &all, &create_options()).unwrap();
    Volume::create("w", &other, &create_options()).unwrap();
    let refused = |name: &str, members: &[MemberAddr]| {
        Volume::open(name, members, &open_options()).unwrap_err().to_string()
    };
    assert!(refused("v", &all[..1]).contains("has 2 members, 1 were given"));
    let swapped = [all[1].clone(), all[0].clone()];
    assert!(refused("v", &swapped).contains("is the volume's member 1"));
    let foreign = [all[0].clone(), other[0].clone()];
    assert!(refused("v", &foreign).contains("belongs to volume \"w\""));
    assert!(refused("x", &all).contains("not \"x\""));
    let missing = [all[0].clone(), MemberAddr { nsid: 7, ..all[1].clone() }];
    assert!(refused("v", &missing).contains("no such namespace"));
    let again = Volume::create("v2", &all, &create_options()).unwrap_err().to_string();
    assert!(again.contains("force"), "{again}");
    let force = CreateOptions { force: true, ..create_options() };
    Volume::create("v2", &all, &force).unwrap();
    Volume::open("v2", &all, &open_options()).unwrap().0.close().unwrap();
    for target in targets {
        target.stop().unwrap();
    }
}

#[test]
fn t17_without_a_log_the_volume_falls_back_to_sync_and_reports_it() {
    let target = target(&["ssd:flash,size=16M"], None);
    let members = members(&[&target], 1);
    let wanted = CreateOptions { engine: Some(EngineKind::Rio), ..create_options() };
    let error = Volume::create("v", &members, &wanted).unwrap_err().to_string();
    assert!(error.contains("no ordering log"), "{error}");
    let info = Volume::create("v", &members, &create_options()).unwrap();
    assert_eq!(info.engine, EngineKind::Sync);
    let wanted = OpenOptions { engine: Some(EngineKind::Rio), ..open_options() };
    let error = Volume::open("v", &members, &wanted).unwrap_err().to_string();
    assert!(error.contains("engine rio can't run"), "{error}");
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    for step in 0..10 {
        write(&mut stream, step, 1, step, false);
    }
    stream.wait(Until::Durable(stream.last()), Some(Duration::from_secs(20))).unwrap();
    check(&mut stream, 9, 1, 9);
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}

/// If a target listens on all addresses, discovery returns the one to which the initiator connected.
#[test]
fn discovery_names_an_address_that_can_be_reached() {
    let mut config = riopipe_target::Config::on_loopback(&["mem:16M"]);
    config.listen = vec!["0.0.0.0:0".into()];
    let target = riopipe_target::Target::start(&config).unwrap();
    let port = target.addresses()[0].port();
    let entries = riopipe::discover("127.0.0.1", port, &connect()).unwrap();
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].traddr, "127.0.0.1");
    assert_eq!(entries[0].trsvcid, port.to_string());
    target.stop().unwrap();
}

#[test]
fn bad_input_has_clear_errors() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M", "mem:1M"], Some(&log));
    let members = members(&[&target], 2);
    let text = |r: Result<_, riopipe::CreateError>| -> String {
        match r {
            Ok::<riopipe::VolumeInfo, _>(info) => panic!("{info:?}"),
            Err(error) => error.to_string(),
        }
    };
    let small = Volume::create("v", &members, &create_options());
    assert!(text(small).contains("too few"));
    let twice = [members[0].clone(), members[0].clone()];
    assert!(text(Volume::create("v", &twice, &create_options())).contains("given twice"));
    let slots = |slots| {
        text(Volume::create("v", &members[..1], &CreateOptions { slots, ..create_options() }))
    };
    assert!(slots(1 << 18).contains("too small"));
    assert!(slots(1 << 20).contains("at most 262144"));
    let closed: MemberAddr = "127.0.0.1:1".parse().unwrap();
    assert!(text(Volume::create("v", &[closed], &create_options())).contains("127.0.0.1:1"));
    let nqn = MemberAddr { nqn: Some("nqn.2020-01.org.example:none".into()), ..members[0].clone() };
    assert!(text(Volume::create("v", &[nqn], &create_options())).contains("no such subsystem"));

    Volume::create("v", &members[..1], &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members[..1], &open_options()).unwrap();
    assert!(volume.stream(4, &StreamOptions::default()).is_err());
    let mut stream = volume.stream(0, &StreamOptions::default()).unwrap();
    assert!(
        volume
            .stream(0, &StreamOptions::default())
            .unwrap_err()
            .to_string()
            .contains("open already")
    );
    let buf = stream.buf(BLOCK_BYTES).unwrap();
    let error = stream.group().write(volume.blocks(), buf, Place::Fresh).submit().unwrap_err();
    assert!(error.to_string().contains("do not lie within"), "{error}");
    assert!(stream.read(volume.blocks(), &mut [0; BLOCK_BYTES], None).is_err());
    assert!(matches!(
        stream.wait(Until::Complete(Seq(99)), None),
        Err(WaitError::NotSubmitted { .. })
    ));
    stream.close().unwrap();
    volume.close().unwrap();
    target.stop().unwrap();
}
