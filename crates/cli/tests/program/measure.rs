//! `rio demo` and `rio bench run`, short: what they print, never how fast it was.

use crate::site::{Site, keys, rio};

#[test]
fn the_demo_verifies_a_file_and_compares_three_engines() {
    let args = ["demo", "--time", "0.1", "--rounds", "2", "--file", env!("CARGO_MANIFEST_PATH")];
    let json = rio(&[&args[..], &["-o", "json"]].concat()).ok();
    assert_eq!(
        keys(&json),
        "drives engines expected file file_bytes file_groups file_seconds machine path \
         power_cut ratio_intervals ratios rounds schema verified workload"
    );
    assert_eq!(json["verified"], true);
    assert_eq!(keys(&json["engines"]), "none rio sync");
    for engine in ["none", "rio", "sync"] {
        assert!(json["engines"][engine]["groups_per_s"].as_f64().unwrap() > 0.0, "{engine}");
    }
    assert_eq!(keys(&json["ratios"]), "rio_over_none rio_over_sync");
    assert_eq!(
        keys(&json["expected"]),
        "flush_ns rio_over_sync sync_group_ns sync_groups_per_s trip_and_write_ns trip_ns write_ns"
    );
    // What `none` leaves is for the drives to decide; what `rio` leaves is a prefix.
    let cut = &json["power_cut"]["rio"];
    assert_eq!(cut["beyond"], 0, "{cut}");
    assert_eq!(cut["recovered"], cut["prefix"]);
    assert!(cut["prefix"].as_u64() >= cut["confirmed"].as_u64(), "{cut}");
    assert!(cut["submitted"].as_u64().unwrap() > 0);
    let text = rio(&args).stdout;
    for part in [
        "verified byte for byte",
        "a prefix, nothing beyond it",
        "engine",
        "rio / sync",
        "With rio,",
        "Why:",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn full_logs_are_recovered_and_everything_is_undone() {
    let words = "bench recovery --streams 3 --rounds 1 --log-size 128K -o json \
                 --drive ssd:optane,size=1G,lazy,file={}";
    let json = rio(&words.split_whitespace().collect::<Vec<_>>()).ok();
    for key in ["total_ms", "reconstruct_ms", "undo_ms", "settle_ms"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}: {json}");
    }
    assert!(json["entries"].as_u64().unwrap() > 1000, "{json}");
    assert_eq!(json["paper"]["reconstruct_ms"], 55.0);
}

#[test]
fn the_demo_of_a_file_that_is_not_there() {
    rio(&["demo", "--file", "/no/such/file", "-o", "json"]).failed(1, &["/no/such/file"]);
}

#[test]
fn bench_measures_what_it_is_told() {
    let words = "bench run --engine rio,none --depth 1,8 --pattern seq --batch 4 --merge off \
                 --time 0.05 --rounds 2 --floor --drive mem:64M,lazy --log-size 1M -o json";
    let json = rio(&words.split_whitespace().collect::<Vec<_>>()).ok();
    assert_eq!(keys(&json), "machine merge place points rounds schema seconds");
    assert_eq!(json["schema"], "rio-bench/1");
    assert_eq!((&json["merge"], &json["rounds"]), (&false.into(), &2.into()));
    let points = json["points"].as_array().unwrap();
    let depths: Vec<_> = points.iter().map(|point| point["queue_depth"].as_u64()).collect();
    assert_eq!(depths, [Some(1), Some(8)]);
    for point in points {
        assert_eq!(keys(&point["engines"]), "floor none rio");
        assert_eq!(keys(&point["ratios"]), "none_over_floor rio_cpu_over_none rio_over_none");
        for engine in ["floor", "none", "rio"] {
            assert!(point["engines"][engine]["writes_per_s"].as_f64().unwrap() > 0.0, "{engine}");
        }
    }
}

#[test]
fn bench_on_several_targets_with_several_threads() {
    let words = "bench run --engine rio,sync --depth 4 --threads 2 --targets 2 --group 2 --size 8K \
                 --time 0.05 --rounds 1 --drive ssd:flash,size=64M,lazy";
    let done = rio(&words.split_whitespace().collect::<Vec<_>>());
    assert_eq!(done.code, 0, "{done:?}");
    for part in ["rio", "sync", "groups of 2", "targets 2", "merge on"] {
        assert!(done.stdout.contains(part), "no {part:?} in {done:?}");
    }
}

#[test]
fn bench_writes_to_an_existing_volume_only_if_told_so() {
    let site = Site::new(2, "mem:64M,lazy");
    site.create();
    let members = site.members();
    let mut args = "bench run --volume v --engine rio --time 0.05 --rounds 1 -o json"
        .split(' ')
        .chain(members.iter().map(String::as_str))
        .collect::<Vec<_>>();
    assert_eq!(rio(&args).code, 2);
    args.push("--overwrite");
    let json = rio(&args).ok();
    assert_eq!(json["place"]["volume"], "v");
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
}

#[test]
fn bench_says_what_is_wrong() {
    let bench = |words: &str| {
        let words = format!("bench run --time 0.05 --rounds 1 -o json {words}");
        rio(&words.split_whitespace().collect::<Vec<_>>())
    };
    bench("--depth 2 --group 4").failed(2, &["raise it to 4"]);
    bench("--drive mem:4M,lazy --threads 64").failed(2, &["larger volume or fewer threads"]);
    bench("--drive disk:7").failed(7, &["unknown kind"]);
    bench("--log-size 8K").failed(7, &["small"]);
}
