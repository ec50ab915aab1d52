//! The blocks that a recovery has saved before it zeroed them: shown, and written back.

use std::{fs, path::Path};

use riopipe::{BLOCK_BYTES, OpenOptions, ReaderOptions, Volume, undone};
use riopipe_target::Config;
use serde_json::Value;

use crate::site::{Done, Site, finish, keys, rio_in, start_in};

/// A volume whose owner was killed in the middle of a copy.
fn cut_off() -> Site {
    let mut site = Site::new(0, "");
    let drive = format!("ssd:flash,size=512M,file={}", site.path("drive").display());
    let mut config = Config::on_loopback(&[&drive]);
    config.subnqn = Some("nqn.2026-11.com.example:undone".to_owned());
    config.log = Some(format!("file:{},size=2M", site.path("log").display()));
    site.add(&config);
    site.create();
    site.file("a", 400 << 20);
    let members = site.members();
    let mut args = vec!["volume", "write", "v", "a", "-o", "json", "--loss-timeout", "0"];
    args.extend(members.iter().map(String::as_str));
    let mut child = start_in(site.folder.path(), &args);
    site.wait_until_written(0);
    child.kill().unwrap();
    finish(child);
    site
}

/// A volume whose owner was killed in the middle of a copy, and that was recovered. The undone
/// blocks are in `lost.rio`.
fn recovered() -> (Site, Value) {
    let site = cut_off();
    let words = ["v", "--take-over", "--acknowledge", "--save-undone", "lost.rio"];
    let recovery = site.volume("recover", &words).ok();
    fs::remove_file(site.path("a")).unwrap();
    (site, recovery)
}

fn show(site: &Site, file: &str) -> Done {
    rio_in(site.folder.path(), &["volume", "undone", "show", file, "-o", "json"])
}

fn apply(site: &Site, words: &[&str]) -> Done {
    let members = site.members();
    let mut args = vec!["volume", "undone", "apply"];
    args.extend(words);
    args.extend(members.iter().map(String::as_str));
    args.extend(["-o", "json", "--timeout", "60"]);
    rio_in(site.folder.path(), &args)
}

/// Whether each block of the file is on the volume with its saved content.
fn all_there(site: &Site) -> bool {
    let file = undone::read(&site.path("lost.rio")).unwrap();
    let member = site.address(0).parse().unwrap();
    let (volume, _) = Volume::open("v", &[member], &OpenOptions::default()).unwrap();
    let reader = volume.reader(&ReaderOptions::default());
    let mut all = true;
    for range in file.extents.iter().map(|extent| extent.range) {
        for lba in range.lba..range.lba + range.blocks {
            let mut block = vec![0; BLOCK_BYTES];
            reader.read(lba, &mut block, None).unwrap();
            all &= Some(block) == file.block(lba).unwrap();
        }
    }
    drop(reader);
    volume.close().unwrap();
    all
}

#[test]
fn undone_blocks_are_shown_and_written_back() {
    let (site, recovery) = recovered();
    let stream = &recovery["streams"][0];
    let undone_blocks = stream["undone_blocks"].as_u64().unwrap();
    assert!(undone_blocks > 0, "the copy was cut off, so something is undone: {recovery}");

    let shown = show(&site, "lost.rio").ok();
    assert_eq!(
        keys(&shown),
        "blocks bytes extents generation id path saved_unix_ms schema version volume"
    );
    assert_eq!(keys(&shown["extents"][0]), "blocks lba seq stream");
    assert_eq!((&shown["schema"], &shown["volume"]), (&"rio-undone/1".into(), &"v".into()));
    assert_eq!(shown["blocks"], undone_blocks);
    assert_eq!(shown["id"], site.volume("show", &[]).ok()["id"]);
    let extents = shown["extents"].as_array().unwrap();
    let sum: u64 = extents.iter().map(|extent| extent["blocks"].as_u64().unwrap()).sum();
    assert_eq!(sum, undone_blocks);
    for extent in extents {
        assert_eq!(extent["stream"], 0);
        assert!(extent["seq"].as_u64() > stream["last"].as_u64(), "{extent} and {stream}");
    }
    let text = rio_in(site.folder.path(), &["volume", "undone", "show", "lost.rio"]).stdout;
    let head = format!("{undone_blocks} undone blocks of volume \"v\"");
    assert!(text.starts_with(&head) && text.contains(" UTC, generation "), "{text}");

    // A dry run writes nothing, and what it lists is then written. It has opened the volume, so that
    // the zeroes might be someone's.
    let dry = apply(&site, &["lost.rio", "--dry-run"]).ok();
    assert_eq!(keys(&dry), "already_there dry_run overwritten path ranges schema volume written");
    let saved_something = dry["written"].as_u64().unwrap() > 0;
    assert!(!saved_something || !all_there(&site), "the dry run has written");
    if saved_something {
        apply(&site, &["lost.rio"]).failed(5, &["read as zeroes", "was opened since", "--force"]);
    }
    let applied = apply(&site, &["lost.rio", "--force"]).ok();
    assert_eq!(applied["ranges"], dry["ranges"]);
    assert_eq!(applied["written"], dry["written"]);
    assert!(all_there(&site));
    // Again: there is nothing left to do.
    let again = apply(&site, &["lost.rio"]).ok();
    assert_eq!((&again["written"], &again["already_there"]), (&0.into(), &undone_blocks.into()));

    // A block that was written since stays, unless that is accepted.
    overwrite(&site, extents[0]["lba"].as_u64().unwrap(), 0x5a);
    let text = apply(&site, &["lost.rio"]).failed(5, &["were written since", "--force"]);
    assert!(text.contains(&format!("volume block {}", extents[0]["lba"])), "{text}");
    assert!(!all_there(&site));
    let forced = apply(&site, &["lost.rio", "--force"]).ok();
    assert_eq!(forced["overwritten"], 1, "{forced}");
    assert!(all_there(&site));
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");

    // A volume made anew is another one, whatever its name is.
    site.volume("create", &["v", "--force"]).ok();
    apply(&site, &["lost.rio", "--force"]).failed(4, &["are of volume", "this is volume"]);
}

/// Writes one block of the volume with other content.
fn overwrite(site: &Site, lba: u64, byte: u8) {
    let member = site.address(0).parse().unwrap();
    let (volume, _) = Volume::open("v", &[member], &OpenOptions::default()).unwrap();
    let mut stream = volume.stream(1, &riopipe::StreamOptions::default()).unwrap();
    let mut buf = stream.buf(BLOCK_BYTES).unwrap();
    buf.fill(byte);
    let group = stream.group().write(lba, buf, riopipe::Place::InPlace);
    group.submit_durable_or_wait(None).unwrap();
    let last = stream.last();
    stream.wait(riopipe::Until::Durable(last), None).unwrap();
    stream.close().unwrap();
    volume.close().unwrap();
}

/// Renaming opens the volume, so it recovers it. That is shown.
#[test]
fn renaming_shows_its_recovery() {
    let site = cut_off();
    let done = site.volume("rename", &["v", "w", "--take-over"]);
    assert_eq!(done.ok()["name"], "w");
    assert!(done.stderr.contains("stream 0") && done.stderr.contains("undone"), "{done:?}");
    let again = site.volume("rename", &["w", "x"]);
    assert!(again.code == 0 && !again.stderr.contains("undone"), "{again:?}");
}

/// Zeroes that were written since are like those of the undo. They stay, unless that is accepted.
#[test]
fn zeroes_that_were_written_since_stay() {
    let (site, _) = recovered();
    let file = undone::read(&site.path("lost.rio")).unwrap();
    let has_data = |lba: &u64| file.block(*lba).unwrap().is_some_and(|saved| saved != [0; 4096]);
    let lbas = file.extents.iter().flat_map(|extent| {
        let range = extent.range;
        range.lba..range.lba + range.blocks
    });
    let Some(lba) = lbas.into_iter().find(has_data) else {
        println!("not tested here: the write was cut off before any undone block had data");
        return;
    };
    overwrite(&site, lba, 0);
    apply(&site, &["lost.rio"]).failed(5, &["read as zeroes", "was opened since", "--force"]);
    assert!(!all_there(&site));
    assert_eq!(apply(&site, &["lost.rio", "--force"]).ok()["overwritten"], 0);
    assert!(all_there(&site));
}

/// Directly after the recovery nothing has to be accepted.
#[test]
fn undone_blocks_are_written_back_directly_after_the_recovery() {
    let (site, _) = recovered();
    let applied = apply(&site, &["lost.rio"]).ok();
    assert_eq!(applied["overwritten"], 0);
    assert!(all_there(&site));
}

#[test]
fn a_damaged_or_foreign_file_of_undone_blocks_is_refused() {
    let (site, _) = recovered();
    let path = site.path("lost.rio");
    let whole = fs::read(&path).unwrap();
    let with = |bytes: &[u8]| {
        fs::write(site.path("bad"), bytes).unwrap();
        (show(&site, "bad"), apply(&site, &["bad"]))
    };
    let refused = |bytes: &[u8], code: i32, word: &str| {
        let (shown, applied) = with(bytes);
        shown.failed(code, &["bad", word]);
        applied.failed(code, &["bad", word]);
    };
    refused(&whole[..whole.len() - 1], 5, "truncated");
    let mut flipped = whole.clone();
    *flipped.last_mut().unwrap() ^= 1;
    refused(&flipped, 5, "checksum of its blocks");
    let mut flipped = whole;
    flipped[70] ^= 1;
    refused(&flipped, 5, "checksum of its header");
    refused(b"not such a file", 1, "no file of undone blocks");
    show(&site, "absent").failed(1, &["absent", "No such file"]);
    assert!(show(&site, ".").code == 1 && Path::new(&path).exists());
}
