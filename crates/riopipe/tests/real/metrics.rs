//! The figures of an open volume. They do not keep the volume open.

use std::time::{Duration, Instant};

use riopipe::{StatError, StreamOptions, Until, Volume, VolumeStat};
use tempfile::TempDir;

use crate::site::{create_options, members, open_options, target, write};

#[test]
fn figures_show_an_open_volume_and_its_end() {
    let log = TempDir::new().unwrap();
    let target = target(&["mem:16M", "mem:16M"], Some(&log));
    let members = members(&[&target], 2);
    Volume::create("v", &members, &create_options()).unwrap();
    let (volume, _) = Volume::open("v", &members, &open_options()).unwrap();
    let figures = volume.stat_source();

    let idle = volume.stat();
    assert_eq!((idle.volume.as_str(), idle.engine.as_str()), ("v", "rio"));
    assert!(idle.streams.is_empty() && idle.opened_unix_ms > 0, "{idle:?}");
    let [stat] = &idle.targets[..] else { panic!("{idle:?}") };
    assert_eq!(stat.address, target.addresses()[0].to_string());
    assert_eq!((stat.subnqn.as_str(), stat.connected), (target.subnqn(), true));

    let options = StreamOptions { merge: false, ..StreamOptions::default() };
    let mut stream = volume.stream(2, &options).unwrap();
    let mut last = stream.last();
    for step in 0..2_000 {
        last = write(&mut stream, step % 1_000, 1, step, false);
    }
    let marks = stream.wait(Until::Durable(last), None).unwrap();
    let stat = volume.stat();
    assert_eq!(stat.streams.len(), 1);
    assert_eq!(
        (stat.streams[0].id, stat.streams[0].complete, stat.streams[0].durable),
        (2, marks.complete.0, marks.durable.0)
    );
    assert!(!stat.streams[0].failed);
    assert!(stat.stages.iter().any(|stage| stage.count > 0), "{stat:?}");
    assert!(stat.uptime_s > idle.uptime_s && stat.is_same_opening(&idle));

    let json = figures.json().unwrap();
    assert!(json.contains(&format!("\"schema\":\"{}\"", VolumeStat::SCHEMA)), "{json}");
    assert!(json.contains(&format!("\"complete\":{}", marks.complete.0)), "{json}");
    let page = figures.open_metrics().unwrap();
    let line = format!("rio_stream_durable_group{{stream=\"2\"}} {}\n", marks.durable.0);
    assert!(page.contains(&line), "no {line:?} in\n{page}");
    assert!(page.contains("rio_volume_info{volume=\"v\",engine=\"rio\""), "{page}");
    assert!(page.contains("rio_stage_seconds_count{stage=\"wire\"}"), "{page}");

    stream.close().unwrap();
    assert!(volume.stat().streams.is_empty());
    volume.close().unwrap();
    // The background thread may still have the volume for a moment.
    let began = Instant::now();
    let error = loop {
        if let Err(error) = figures.open_metrics() {
            break error;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "the figures keep the volume open");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(error, StatError::Gone("the volume has been closed"));
    assert_eq!(figures.json().unwrap_err(), error);

    // The volume is released: the next owner gets it although the figures' handle still exists.
    let (volume, recovery) = Volume::open("v", &members, &open_options()).unwrap();
    assert!(recovery.is_nothing(), "{recovery}");
    assert!(!volume.stat().is_same_opening(&stat));
    volume.close().unwrap();
    target.stop().unwrap();
}
