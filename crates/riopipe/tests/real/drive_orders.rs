//! Engines that need drives which keep an order by themselves.

use std::time::Duration;

use riopipe::{BLOCK_BYTES, CreateOptions, EngineKind, OpenOptions, StreamOptions, Until, Volume};

use crate::site::{check, create_options, members, open_options, target, write};

const WAIT: Option<Duration> = Some(Duration::from_secs(20));

fn on(engine: EngineKind) -> CreateOptions {
    CreateOptions { engine: Some(engine), ..create_options() }
}

#[test]
fn barriers_keep_the_order_of_writes_of_all_sizes() {
    for drives in [1, 2] {
        let specs = ["ssd:flash,size=16M,order=barrier", "ssd:optane,size=16M,order=barrier"];
        let target = target(&specs[..drives], None);
        let members = members(&[&target], drives as u32);
        let info = Volume::create("v", &members, &on(EngineKind::Barrier)).unwrap();
        assert_eq!(info.engine, EngineKind::Barrier);
        let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
        let mut streams: Vec<_> =
            (0..2).map(|id| volume.stream(id, &StreamOptions::default()).unwrap()).collect();
        // A large write waits until the target asks for its data. A small one behind it, which
        // travels in its command, must not pass it.
        let large = 128 * 1024 / BLOCK_BYTES;
        for step in 0..40 {
            for (stream, at) in streams.iter_mut().zip([0, 1000]) {
                let (lba, blocks) = if step % 3 == 0 { (at, large) } else { (at + step % 5, 1) };
                write(stream, lba, blocks, step, step % 16 == 15);
                if step % 4 == 0 {
                    stream.poll().unwrap();
                }
            }
        }
        for (stream, at) in streams.iter_mut().zip([0, 1000]) {
            stream.wait(Until::Durable(stream.last()), WAIT).unwrap();
            check(stream, at, large, 39);
        }
        drop(streams);
        drop(volume);
        let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
        let mut stream = volume.stream(1, &StreamOptions::default()).unwrap();
        check(&mut stream, 1000, 1, 39);
        stream.close().unwrap();
        volume.close().unwrap();
        target.stop().unwrap();
    }
}

#[test]
fn streams_without_an_order_are_written_beside_those_with_one() {
    let target = target(&["ssd:flash,size=16M,order=barrier"], None);
    let members = members(&[&target], 1);
    Volume::create("v", &members, &on(EngineKind::Barrier)).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let orderless = StreamOptions { orderless: true, ..StreamOptions::default() };
    let mut ordered = volume.stream(0, &StreamOptions::default()).unwrap();
    let mut free = volume.stream(1, &orderless).unwrap();
    let large = 128 * 1024 / BLOCK_BYTES;
    for step in 0..40 {
        write(&mut ordered, 0, large, step, false);
        write(&mut free, 1000 + step, 1, step, step == 39);
    }
    free.wait(Until::Durable(free.last()), WAIT).unwrap();
    ordered.wait(Until::Durable(ordered.last()), WAIT).unwrap();
    check(&mut ordered, 0, large, 39);
    for step in 0..40 {
        check(&mut free, 1000 + step, 1, step);
    }
    drop((ordered, free));
    volume.close().unwrap();

    let wanted = OpenOptions { engine: Some(EngineKind::Sync), ..open_options() };
    let (volume, _) = Volume::open("v", &members, &wanted).unwrap();
    let error = volume.stream(1, &orderless).unwrap_err().to_string();
    assert!(error.contains("engine `barrier`") && error.contains("`sync`"), "{error}");
    volume.close().unwrap();
    target.stop().unwrap();
}

#[test]
fn t17_an_engine_is_refused_where_a_drive_does_not_keep_its_order() {
    let target = target(&["ssd:flash,size=16M,order=barrier", "ssd:flash,size=16M"], None);
    let both = members(&[&target], 2);
    let error = Volume::create("v", &both, &on(EngineKind::Barrier)).unwrap_err().to_string();
    assert!(error.contains("no cache barrier"), "{error}");
    Volume::create("v", &both, &on(EngineKind::Sync)).unwrap();
    let wanted = OpenOptions { engine: Some(EngineKind::Barrier), ..open_options() };
    let error = Volume::open("v", &both, &wanted).unwrap_err().to_string();
    assert!(error.contains("no cache barrier"), "{error}");
    target.stop().unwrap();
}
