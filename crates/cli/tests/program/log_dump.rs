//! `rio log dump`: a log read from its medium.

use std::{fs, path::Path};

use riopipe::crc32c;
use riopipe_media::boot_id;
use riopipe_order::attribute::{Attribute, Flags, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::{
    HEADER_COPY_BYTES, LogKind, LogRegion, MemberNamespace, NewVolume, VolumeState,
};
use riopipe_order::ordering_log::{StreamLog, partition_bytes};
use riopipe_order::region::{MemRegion, Region};

use crate::site::{Site, keys, rio, rio_in};

const VOLUMES: [VolumeId; 2] = [VolumeId([0x11; 16]), VolumeId([0x22; 16])];
const SLOTS: u32 = 64;
const LEN: usize = 1 << 20;

fn attribute(seq: u64) -> Attribute {
    Attribute {
        seq: Seq(seq),
        span: 1,
        num: 2,
        index: (seq % 2) as u16,
        ordinal: seq as u32,
        member: Member(3),
        kind: Kind::Write,
        flags: Flags::BOUNDARY.with(Flags::FLUSH),
        lba: 1000 * seq,
        blocks: 8,
        tag: 0xabc0 + seq,
    }
}

/// A region with two volumes of two streams. Stream 1 of the first volume has groups 1 to 9: 4 are
/// released and 6 are durable.
fn region() -> Vec<u8> {
    let boot = boot_id().unwrap();
    let header = MemRegion::new(LEN);
    let mut log = LogRegion::create(header, LEN, [0x33; 16], boot, LogKind::Block, crc32c).unwrap();
    let mut parts = Vec::new();
    for id in VOLUMES {
        let member = MemberNamespace { member: Member(3), nsid: 7 };
        let volume = NewVolume { id, streams: 2, slots: SLOTS, members: vec![member] };
        log.add_volume(volume, |stream, range| {
            let id = PartitionId { volume: id, stream };
            let part = MemRegion::new(partition_bytes(SLOTS));
            let mut log = StreamLog::format(part, id, 1, crc32c).unwrap();
            if id.volume == VOLUMES[0] && stream == StreamId(1) {
                log.start(Origin { generation: 5, incarnation: 9 }, Seq(0)).unwrap();
                let at: Vec<_> = (1..=9).map(|s| log.append(&attribute(s)).unwrap()).collect();
                log.fence().unwrap();
                at[..6].iter().for_each(|position| log.persist(*position));
                log.fence().unwrap();
                log.release_now(Seq(4)).unwrap();
            }
            parts.push((range, log.into_region()));
            Ok(())
        })
        .unwrap();
    }
    log.set_generation(VOLUMES[0], 5, [0x44; 16], 45_000).unwrap();
    log.set_state(VOLUMES[0], VolumeState::Owned).unwrap();
    let mut bytes = log.into_region();
    for (range, part) in parts {
        bytes.write(range.start, part.bytes());
    }
    bytes.bytes().to_vec()
}

fn dump(path: &Path, words: &[&str]) -> crate::site::Done {
    let region = format!("file:{}", path.display());
    rio(&[&["log", "dump", &region, "-o", "json"], words].concat())
}

#[test]
fn everything_in_a_log_is_shown_and_nothing_is_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    fs::write(&path, region()).unwrap();
    // Permission to read is enough.
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    let printed = dump(&path, &[]).ok();
    assert_eq!(
        keys(&printed),
        "boot bytes header_writes incarnation kind region schema served this_boot trusted uuid \
         volumes"
    );
    assert_eq!(printed["schema"], "rio-log/1");
    assert_eq!((&printed["kind"], &printed["served"]), (&"block".into(), &false.into()));
    assert_eq!((&printed["this_boot"], &printed["trusted"]), (&true.into(), &true.into()));
    let volumes = printed["volumes"].as_array().unwrap();
    assert_eq!(volumes.len(), 2);
    assert_eq!(
        keys(&volumes[0]),
        "generation id members offset owner partitions slots state streams"
    );
    assert_eq!(volumes[0]["id"], VOLUMES[0].to_string());
    assert_eq!((&volumes[0]["state"], &volumes[1]["state"]), (&"owned".into(), &"closed".into()));
    assert_eq!(volumes[0]["generation"], 5);
    assert_eq!(volumes[0]["members"][0], serde_json::json!({"member": 3, "nsid": 7}));
    let empty = &volumes[0]["partitions"][0];
    assert_eq!((&empty["live"], &empty["entries"]), (&0.into(), &serde_json::json!([])));
    let full = &volumes[0]["partitions"][1];
    assert_eq!(
        keys(full),
        "entries error generation incarnation live released settled stale stream tag tag_seq torn"
    );
    for (key, value) in [("released", 4), ("live", 5), ("torn", 0), ("generation", 5)] {
        assert_eq!(full[key], value, "{key}");
    }
    assert_eq!((&full["tag_seq"], &full["tag"]), (&4.into(), &0xabc4.into()));
    assert_eq!(full["settled"], false);
    assert_eq!(
        full["entries"][0],
        serde_json::json!({
            "position": 4, "seq": 5, "span": 1, "num": 2, "index": 1, "ordinal": 5, "member": 3,
            "kind": "write", "flags": ["boundary", "flush"], "lba": 5000, "blocks": 8,
            "tag": 0xabc5, "persisted": true, "generation": 5, "incarnation": 9
        })
    );
    let persisted = full["entries"].as_array().unwrap().iter().map(|e| e["persisted"] == true);
    assert_eq!(persisted.collect::<Vec<_>>(), [true, true, false, false, false]);
    assert!(fs::read(&path).unwrap() == region(), "it was written to");

    // The text has it, too.
    let spec = format!("file:{}", path.display());
    let text = rio(&["log", "dump", &spec]).stdout;
    let id = VOLUMES[0].to_string();
    for word in [&id[..], "owned", "2 of 2", "5000 + 8", "boundary flush", "0xabc4 of group 4"] {
        assert!(text.contains(word), "no {word:?} in {text}");
    }
    // Options for serving the log are accepted.
    for other in
        [format!("{spec},size=1M"), spec.replace("file:", "block:"), spec.replace("file:", "dax:")]
    {
        assert_eq!(rio(&["log", "dump", &other]).code, 0, "{other}");
    }
}

#[test]
fn one_volume_one_stream_or_no_entries() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    fs::write(&path, region()).unwrap();
    let printed = dump(&path, &["--volume", "11111111-11", "--stream", "1"]).ok();
    assert_eq!(printed["volumes"].as_array().unwrap().len(), 1);
    let partitions = printed["volumes"][0]["partitions"].as_array().unwrap();
    assert_eq!((partitions.len(), &partitions[0]["stream"]), (1, &1.into()));
    let printed = dump(&path, &["--summary"]).ok();
    let partition = &printed["volumes"][0]["partitions"][1];
    assert_eq!((&partition["live"], partition.get("entries")), (&5.into(), None));
    dump(&path, &["--volume", "99"]).failed(2, &["no volume", &VOLUMES[1].to_string()]);
    dump(&path, &["--stream", "2"]).failed(2, &["stream 2"]);
}

/// T19, for a person: the damage is reported, and everything readable is shown.
#[test]
fn damage_is_reported_and_the_rest_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let whole = region();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
    };
    let second = {
        fs::write(&path, &whole).unwrap();
        let printed = dump(&path, &["--summary"]).ok();
        let offset = printed["volumes"][0]["offset"].as_u64().unwrap() as usize;
        offset + partition_bytes(SLOTS).next_multiple_of(4096)
    };
    // Position 4, in the slot of that number: 5 is persisted, so 4 was durable before it.
    let entry = second + partition_bytes(4);
    with(&|bytes| bytes[entry + 30] ^= 1);
    let done = dump(&path, &[]);
    done.failed(5, &["stream 1 is damaged", "entry 4"]);
    let printed = done.json();
    let partitions = &printed["volumes"][0]["partitions"];
    assert!(partitions[1]["error"].as_str().unwrap().contains("entry 4"), "{partitions}");
    assert_eq!((&partitions[0]["error"], &partitions[0]["live"]), (&().into(), &0.into()));
    assert_eq!(printed["volumes"][1]["partitions"].as_array().unwrap().len(), 2);
    let text = rio(&["log", "dump", &format!("file:{}", path.display())]);
    assert!(text.code == 5 && text.stdout.contains("is damaged"), "{text:?}");
    // A damaged partition that is filtered out is ignored.
    dump(&path, &["--stream", "0"]).ok();

    with(&|bytes| bytes[second..second + partition_bytes(SLOTS)].fill(0));
    dump(&path, &[]).failed(5, &["stream 1 is blank"]);

    // One header copy is enough.
    with(&|bytes| bytes[100] ^= 1);
    dump(&path, &[]).ok();
    with(&|bytes| {
        bytes[100] ^= 1;
        bytes[HEADER_COPY_BYTES + 100] ^= 1;
    });
    dump(&path, &[]).failed(7, &["is damaged", "header"]);
    with(&|bytes| bytes.truncate(LEN / 2));
    dump(&path, &[]).failed(7, &["its size is not the one it was made with"]);
    with(&|bytes| bytes.fill(0));
    dump(&path, &[]).failed(7, &["blank"]);
    with(&|bytes| bytes.fill(b'x'));
    dump(&path, &[]).failed(7, &["not a log region"]);
    with(&|bytes| bytes.truncate(100));
    dump(&path, &[]).failed(7, &["not a log region"]);
    // The version follows the checksum, at the same place in every version.
    with(&|bytes| {
        for copy in [0, HEADER_COPY_BYTES] {
            bytes[copy + 12..copy + 16].copy_from_slice(&99u32.to_le_bytes());
            let crc = crc32c(0, &bytes[copy + 12..copy + HEADER_COPY_BYTES]);
            bytes[copy + 8..copy + 12].copy_from_slice(&crc.to_le_bytes());
        }
    });
    dump(&path, &[]).failed(7, &["version 99", "newer"]);
    fs::remove_file(&path).unwrap();
    dump(&path, &[]).failed(7, &["can't be read", "No such file"]);
    rio(&["log", "dump", "tape:/dev/st0", "-o", "json"]).failed(2, &["unknown kind", "logs are"]);
    rio(&["log", "dump", "mem:2M", "-o", "json"]).failed(7, &["memory"]);
}

#[test]
fn a_log_that_is_being_served() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("a", 100_000);
    site.volume("write", &["v", "a"]).ok();
    let log = format!("file:{}", site.path("log-0").display());
    let done = rio_in(site.folder.path(), &["log", "dump", &log, "-o", "json"]);
    let printed = done.ok();
    assert_eq!(printed["served"], true);
    assert!(done.stderr.contains("a target serves this log"), "{done:?}");
    let partition = &printed["volumes"][0]["partitions"][0];
    assert!(partition["released"].as_u64().unwrap() > 0, "{partition}");
    // It is still served and locked.
    site.volume("verify", &["v", "a"]).ok();
}
