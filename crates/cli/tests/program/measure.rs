//! `rio demo` and `rio bench …`, short: their output, never their speed.

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
    // The content that `none` leaves depends on the drives; that of `rio` is a prefix.
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
                 --drive ssd:optane,size=1G,lazy,file={} \
                 --replay-drive ssd:flash,size=256M,lazy,file={}";
    let json = rio(&words.split_whitespace().collect::<Vec<_>>()).ok();
    for key in ["total_ms", "reconstruct_ms", "undo_ms", "settle_ms", "replay_ms"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}: {json}");
    }
    assert!(json["entries"].as_u64().unwrap() > 1000, "{json}");
    assert!(json["replayed"].as_u64().unwrap() > 0, "{json}");
    assert_eq!(json["paper"]["reconstruct_ms"], 55.0);
}

#[test]
fn a_log_is_kept_in_two_ways_in_turns() {
    let words = "bench wal --producers 1,3 --record 100,5000 --time 0.05 --rounds 2 \
                 --drive ssd:flash,size=256M,lazy";
    let words: Vec<_> = words.split_whitespace().collect();
    let json = rio(&[&words[..], &["-o", "json"]].concat()).ok();
    assert_eq!(keys(&json), "drive flushes groups machine points rounds schema seconds targets");
    assert_eq!(json["schema"], "rio-bench-wal/1");
    let points = json["points"].as_array().unwrap();
    assert_eq!(points.len(), 4);
    for point in points {
        for way in ["wal", "flush"] {
            assert_eq!(keys(&point[way]), "p50_us p99_us records_per_s");
            assert!(point[way]["records_per_s"].as_f64().unwrap() > 0.0, "{point}");
            assert!(point[way]["p99_us"].as_f64() >= point[way]["p50_us"].as_f64(), "{point}");
        }
        assert!(point["ratio"].as_f64().unwrap() > 0.0, "{point}");
    }
    let of = |key: &str| points.iter().map(|p| p[key].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("producers"), [1, 3, 1, 3]);
    assert_eq!(of("record_bytes"), [100, 100, 5000, 5000]);
    let text = rio(&words).stdout;
    for part in ["producers", "wal / flush", "4.9 KiB", "medians of 2 rounds"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

#[test]
fn a_file_system_is_measured_in_all_modes_in_turns() {
    let words = "bench fs --workload append_fsync --profile mem --rtt 0us,50us --threads 1,2 \
                 --time 0.05 --rounds 2";
    let words: Vec<_> = words.split_whitespace().collect();
    let json = rio(&[&words[..], &["-o", "json"]].concat()).ok();
    let all = "append_bytes machine paper points rounds schema seconds streams through";
    assert_eq!(keys(&json), all);
    assert_eq!((&json["schema"], &json["through"]), (&"rio-bench-fs/1".into(), &"calls".into()));
    let points = json["points"].as_array().unwrap();
    for point in points {
        let all = "by floor modes profile ratios rtt_us set_aside threads workload";
        assert_eq!(keys(point), all);
        assert_eq!(
            (&point["workload"], &point["profile"]),
            (&"append_fsync".into(), &"mem".into())
        );
        for mode in ["ext4", "horae", "rio"] {
            let figures = &point["modes"][mode];
            is_measured(figures);
            let fsync = &figures["fsync"];
            let all = "breakdown calls drive_flushes drive_writes mean_us p50_us p99_us \
                       serial_waits trace";
            assert_eq!(keys(fsync), all);
            // Each stage is a part of the call, and all stages are the whole.
            let stages = fsync["breakdown"].as_array().unwrap();
            let sum: f64 = stages.iter().map(|stage| stage["mean_us"].as_f64().unwrap()).sum();
            let mean = fsync["mean_us"].as_f64().unwrap();
            assert!((sum - mean).abs() <= mean / 1e6, "{sum} {mean}: {point}");
        }
        for ratio in ["rio_over_ext4", "rio_over_horae", "rio_over_floor", "rio_p99_over_ext4"] {
            assert!(point["ratios"][ratio].as_f64().unwrap() > 0.0, "{point}");
        }
        let floor = &point["floor"];
        assert_eq!(keys(floor), "drive_flushes drive_writes ops_per_s p50_us p99_us");
        // The drive may write both blocks at once, if they lie side by side.
        assert!((1.0..=2.5).contains(&floor["drive_writes"].as_f64().unwrap()), "{point}");
    }
    // A memory drive needs no FLUSH. The first commit, and those of the background, wait once more.
    for (mode, waits) in [("rio", 1.0), ("horae", 1.0), ("ext4", 3.0)] {
        let fsync = &points[0]["modes"][mode]["fsync"];
        let mean = fsync["serial_waits"].as_f64().unwrap();
        assert!((mean - waits).abs() < 0.5, "{mode}: {fsync}");
    }
    let of = |key: &str| points.iter().map(|p| p[key].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(of("threads"), [1.0, 2.0, 1.0, 2.0]);
    assert_eq!(of("rtt_us"), [0.0, 0.0, 50.0, 50.0]);
    let text = rio(&words).stdout;
    for part in [
        "rio / ext4",
        "rio / horae",
        "rio / floor",
        "wait record",
        "without FUSE",
        "medians of 2 rounds",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

/// The figures of a mode of `bench fs` make sense.
fn is_measured(figures: &serde_json::Value) {
    let all = "cpu_us_per_op fsync initiator_cpu_us_per_op mean_us ops_per_s p50_us p999_us \
               p99_us target_cpu_us_per_op";
    assert_eq!(keys(figures), all);
    let of = |key: &str| figures[key].as_f64().unwrap();
    assert!(of("ops_per_s") > 0.0, "{figures}");
    assert!(of("p99_us") >= of("p50_us"), "{figures}");
    assert!(of("cpu_us_per_op") >= of("initiator_cpu_us_per_op"), "{figures}");
}

#[test]
fn applications_on_a_file_system_are_measured_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let words = "bench fs --quick --profile flash --rtt 0us --threads 2 --time 0.05 --rounds 1 \
                 -o json --plot";
    let mut words: Vec<_> = words.split_whitespace().collect();
    words.push(plots.to_str().unwrap());
    let json = rio(&words).ok();
    let points = json["points"].as_array().unwrap();
    let loads: Vec<_> = points.iter().map(|point| point["workload"].as_str().unwrap()).collect();
    assert_eq!(loads, ["append_fsync", "varmail", "rocksdb_fillsync"]);
    for point in points {
        assert_eq!(point["by"], "rio");
        assert_eq!(point["floor"].is_object(), point["workload"] == "append_fsync");
        for mode in ["ext4", "horae", "barrier", "opimq", "rio"] {
            is_measured(&point["modes"][mode]);
        }
        for ratio in ["rio_over_barrier", "rio_over_opimq"] {
            assert!(point["ratios"][ratio].as_f64().unwrap() > 0.0, "{point}");
        }
    }
    let drawn: Vec<_> = json["plots"].as_array().unwrap().iter().collect();
    assert_eq!(drawn.len(), 4);
    for name in ["append_fsync", "fsync", "varmail", "rocksdb_fillsync"] {
        let picture = std::fs::read_to_string(plots.join(format!("{name}-flash-0us.svg"))).unwrap();
        for mode in ["ext4", "horae", "barrier", "opimq", "rio"] {
            assert!(picture.contains(mode), "{name}");
        }
    }
}

#[test]
fn a_file_system_is_measured_through_a_mount() {
    let words = "bench fs --workload append_fsync,varmail --through mount --profile mem --rtt 0us \
                 --threads 2 --time 0.05 --rounds 1 -o json";
    let json = rio(&words.split_whitespace().collect::<Vec<_>>()).ok();
    assert_eq!(json["through"], "mount");
    let points = json["points"].as_array().unwrap();
    assert_eq!(points.len(), 2);
    for point in points {
        for mode in ["ext4", "horae", "rio"] {
            is_measured(&point["modes"][mode]);
            assert!(point["modes"][mode]["fsync"]["calls"].as_u64().unwrap() > 0, "{point}");
        }
    }
}

#[test]
fn the_demo_of_a_missing_file() {
    rio(&["demo", "--file", "/no/such/file", "-o", "json"]).failed(1, &["/no/such/file"]);
}

/// Checks the report of stolen time; the amount depends on the host.
fn reports_what_the_host_did(point: &serde_json::Value) {
    assert!(point["set_aside"].is_u64(), "{point}");
    // Every kernel that counts has an eighth number (since Linux 2.6.11).
    let stole = point["host_stole"].as_f64();
    assert!(stole.is_some_and(|share| (0.0..=1.0).contains(&share)), "{point}");
}

#[test]
fn bench_measures_the_requested_points() {
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
        reports_what_the_host_did(point);
        assert_eq!(keys(&point["engines"]), "floor none rio");
        assert_eq!(keys(&point["ratios"]), "none_over_floor rio_cpu_over_none rio_over_none");
        for engine in ["floor", "none", "rio"] {
            assert!(point["engines"][engine]["writes_per_s"].as_f64().unwrap() > 0.0, "{engine}");
        }
    }
}

#[test]
fn the_floor_is_a_command_of_its_own() {
    let words = "bench floor --depth 1,8 --time 0.05 --rounds 2 --drive mem:64M,lazy --rtt 1ms";
    let args: Vec<_> = words.split(' ').collect();
    let json = rio(&[&args[..], &["-o", "json"]].concat()).ok();
    assert_eq!(keys(&json), "drive link machine points rounds schema seconds wait");
    let point = &json["points"][1];
    assert_eq!(point["queue_depth"], 8);
    reports_what_the_host_did(point);
    assert_eq!(keys(&point["engines"]), "floor");
    let floor = &point["engines"]["floor"];
    assert!(floor["latency"]["p50_ns"].as_u64().unwrap() >= 990_000, "{floor}");
    assert!(floor["blocking"]["writes_per_s"].as_f64().unwrap() > 0.0, "{floor}");
    assert!(floor["target_cpu_ns_per_write"].as_f64().unwrap() > 0.0, "{floor}");
    let text = rio(&args).stdout;
    assert!(text.contains("floor") && text.contains("round trip 1.00 ms"), "{text}");
    assert!(!text.contains("Ratios"), "{text}");
}

/// The JSON's documented fields are present at every point, and the pictures exist.
#[test]
fn compare_has_every_contender_ratio_and_picture() {
    let folder = tempfile::tempdir().unwrap();
    let plots = folder.path().join("plots");
    let words = "bench compare --depth 1,8 --batch 1,4 --time 0.02 --rounds 2 --drive mem:64M,lazy";
    let mut args: Vec<_> = words.split(' ').collect();
    args.extend(["--plot", plots.to_str().unwrap(), "-o", "json"]);
    let json = rio(&args).ok();
    assert_eq!(
        keys(&json),
        "drive logs machine plots points rounds schema seconds targets unit_bytes wait"
    );
    assert_eq!(json["schema"], "rio-bench/1");
    let points = json["points"].as_array().unwrap();
    assert_eq!(points.len(), 3);
    for point in points {
        for key in ["threads", "size", "batch", "queue_depth"] {
            assert!(point[key].is_u64(), "{key}: {point}");
        }
        reports_what_the_host_did(point);
        // Where merging needs sequential writes, its denominator does, too.
        let alone = point["batch"] == 1;
        let seq = if alone { "none_seq " } else { "" };
        let engines = format!("floor horae linux none {seq}rio rio_block rio_dax rio_merged sync");
        assert_eq!(keys(&point["engines"]), engines);
        for (name, figures) in point["engines"].as_object().unwrap() {
            for key in ["writes_per_s", "cpu_ns_per_write", "target_cpu_ns_per_write"] {
                assert!(figures[key].as_f64().unwrap() > 0.0, "{name}: {key}");
            }
            for key in ["p50_ns", "p99_ns", "p999_ns"] {
                assert!(figures["latency"][key].is_u64(), "{name}: {key}");
            }
        }
        for ratio in [
            "none_over_floor",
            "rio_over_none",
            "rio_cpu_over_none",
            "rio_merged_over_none",
            "rio_dax_over_none",
            "rio_block_over_none",
            "rio_over_sync",
            "rio_over_linux",
            "rio_over_horae",
        ] {
            assert!(point["ratios"][ratio].as_f64().unwrap() > 0.0, "{ratio}");
            assert!(point["ratio_intervals"][ratio].is_array(), "{ratio}");
        }
    }
    assert_eq!(keys(&json["logs"]), "horae rio rio_block rio_dax rio_merged");
    for name in ["depth.svg", "batch.svg"] {
        let picture = std::fs::read_to_string(plots.join(name)).unwrap();
        assert!(picture.contains("rio_merged"), "{name}");
    }
}

#[test]
fn compare_shows_tables_and_ratios_on_modelled_drives_behind_a_link() {
    let words = "bench compare --depth 4 --time 0.02 --rounds 2 --drive ssd:optane,size=64M,lazy \
                 --targets 2 --engine none,rio,sync,linux,horae --wait block --rtt 200us --jitter 20us";
    let done = rio(&words.split_whitespace().collect::<Vec<_>>());
    assert_eq!(done.code, 0, "{done:?}");
    for part in [
        "CPU/op",
        "rio/none",
        "rio/sync",
        "rio/linux",
        "rio/horae",
        "wait block",
        "modelled link",
        "2 targets",
    ] {
        assert!(done.stdout.contains(part), "no {part:?} in {done:?}");
    }
    assert!(!done.stdout.contains("floor"), "{done:?}");
}

#[test]
fn compare_reports_errors() {
    let compare = |words: &str| {
        let words = format!("bench compare --rounds 1 --time 0.02 -o json {words}");
        rio(&words.split_whitespace().collect::<Vec<_>>())
    };
    compare("--depth 1 --drive ssd:flash,size=64M,lazy --engine floor").failed(2, &["mem:"]);
    compare("--depth 32 --drive mem:4M,lazy --threads 64").failed(2, &["fewer threads"]);
    compare("--depth 1 --drive disk:7").failed(2, &["unknown kind"]);
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
fn bench_writes_to_an_existing_volume_only_on_request() {
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
fn bench_reports_errors() {
    let bench = |words: &str| {
        let words = format!("bench run --time 0.05 --rounds 1 -o json {words}");
        rio(&words.split_whitespace().collect::<Vec<_>>())
    };
    bench("--depth 2 --group 4").failed(2, &["raise it to 4"]);
    bench("--drive mem:4M,lazy --threads 64").failed(2, &["larger volume or fewer threads"]);
    bench("--drive disk:7").failed(2, &["unknown kind"]);
    bench("--log-size 8K").failed(7, &["small"]);
}

#[test]
fn the_figures_of_the_papers_are_listed() {
    let json = rio(&["lab", "list", "-o", "json"]).ok();
    let figures = json["figures"].as_array().unwrap();
    assert!(figures.len() >= 12, "{json}");
    for figure in figures {
        assert_eq!(keys(figure), "id question source title");
    }
    let text = rio(&["lab", "list"]).stdout;
    assert!(text.contains("rio-10b") && text.contains("EuroSys '23"), "{text}");
    let unknown = rio(&["lab", "run", "rio-99"]);
    assert_eq!(unknown.code, 2, "{unknown:?}");
    assert!(unknown.stderr.contains("rio-2a"), "{}", unknown.stderr);
}

/// `scripts/check-report` measures contenders that share a stream, and a load on the file system.
#[test]
fn contenders_that_redirect_updates_or_move_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let ids = ["horae-overwrite", "opimq-pinning"];
    let words = ["lab", "run"].into_iter().chain(ids);
    let words: Vec<&str> = words.chain(["--quick", "--out", out, "-o", "json"]).collect();
    let json = rio(&words).ok();
    let figures = json["figures"].as_array().unwrap();
    assert_eq!(figures.len(), ids.len());
    for figure in figures {
        assert!(ids.iter().any(|id| figure["id"] == *id), "{figure}");
        for panel in figure["panels"].as_array().unwrap() {
            for curve in panel["curves"].as_array().unwrap() {
                for value in curve["values"].as_array().unwrap() {
                    assert!(value["median"].as_f64().unwrap() > 0.0, "{curve} of {figure}");
                }
            }
        }
    }
}

/// The commands at a drive, over time and under the calls of a program.
#[test]
fn the_queue_of_a_drive_is_a_figure() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let words = ["lab", "run", "barrier-10b", "barrier-12", "--quick", "--out", out, "-o", "json"];
    let json = rio(&words).ok();
    let figures = json["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 2);
    for figure in figures {
        for claim in figure["claims"].as_array().unwrap() {
            assert!(claim["here"].as_f64().unwrap() > 0.0, "{claim}");
        }
    }
    let largest = &figures[1]["panels"][0];
    assert_eq!(largest["ticks"], serde_json::json!(["fsync", "fbarrier"]));
    for curve in largest["curves"].as_array().unwrap() {
        for value in curve["values"].as_array().unwrap() {
            assert!(value["median"].as_f64().unwrap() >= 1.0, "{curve}");
        }
    }
    let page = std::fs::read_to_string(folder.path().join("index.html")).unwrap();
    assert!(page.contains("id=\"barrier-12\"") && page.contains("id=\"barrier-10b\""));
}

/// A figure is measured, drawn and put into the report. The next call takes it from the folder, and a
/// run that was interrupted goes on with the points that it has.
#[test]
fn a_figure_is_measured_once_and_an_interrupted_run_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let words = ["lab", "run", "rio-3b", "--quick", "--out", out, "-o", "json"];
    let json = rio(&words).ok();
    let figure = &json["figures"][0];
    assert_eq!(figure["id"], "rio-3b");
    let points = figure["points"].as_array().unwrap();
    assert_eq!(points.len(), 3);
    for name in ["orderless", "orderless w/o merge"] {
        assert!(points[0]["engines"][name]["writes_per_s"].as_f64().unwrap() > 0.0, "{figure}");
    }
    for claim in figure["claims"].as_array().unwrap() {
        assert!(claim["here"].as_f64().unwrap() > 0.0, "{claim}");
    }
    let read = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    let page = String::from_utf8(read("index.html")).unwrap();
    assert!(page.contains("id=\"rio-3b\"") && page.contains("<svg"), "{page}");
    assert!(read("rio-3b.svg").starts_with(b"<svg"));
    assert_eq!(&read("rio-3b.png")[1..4], b"PNG");

    let again = rio(&words);
    assert!(again.stderr.contains("measured already"), "{}", again.stderr);
    assert_eq!(again.ok()["figures"][0]["points"], figure["points"]);

    // As an interruption after two points leaves it.
    let part = serde_json::json!({
        "version": env!("CARGO_PKG_VERSION"), "quick": true, "trip_ns": 12_345.0, "points": points[..2],
    });
    std::fs::remove_file(folder.path().join("rio-3b.json")).unwrap();
    std::fs::write(folder.path().join("rio-3b.part.json"), part.to_string()).unwrap();
    let json = rio(&words).ok();
    let figure = &json["figures"][0];
    assert_eq!(figure["points"].as_array().unwrap()[..2], points[..2]);
    assert_eq!(figure["points"].as_array().unwrap().len(), 3);
    assert!(!folder.path().join("rio-3b.part.json").exists());
}
