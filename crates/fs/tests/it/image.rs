//! Images as volumes: mounted again, after a crash of the process, and without their side folder.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use riopipe_fs::image::{ImageError, side_folder};
use riopipe_fs::mkfs::find_e2fs_program;
use riopipe_fs_core::storage::{Storage, StreamNo};

use crate::support::{FREE, Mounted, filled, group, new_image};

/// The variable that makes [`the_process_that_is_killed`] write to an image.
const IMAGE: &str = "RIOFS_TEST_IMAGE";

#[test]
fn an_image_stays_plain_and_its_blocks_are_there_again() {
    let (_dir, path) = new_image();
    let mounted = Mounted::open(&path).unwrap();
    assert!(mounted.recovery.is_nothing());
    assert_eq!(mounted.storage.blocks(), 32_768);
    // Out of order, in two runs.
    let blocks = [(FREE + 2, 2), (FREE, 7), (FREE + 1, 1), (FREE + 9, 9)];
    let seq = mounted.storage.submit(StreamNo(1), group(&blocks, true)).unwrap();
    mounted.storage.wait_durable(StreamNo(1), seq).unwrap();
    assert_eq!([0, 1, 2, 3, 9].map(|n| mounted.number(FREE + n)), [7, 1, 2, 0, 9]);
    assert!(side_folder(&path).join("log").exists());
    mounted.close();

    assert!(!side_folder(&path).exists());
    let bytes = fs::read(&path).unwrap();
    assert_eq!(bytes.len(), 128 << 20);
    assert_eq!(bytes[(FREE as usize + 1) * 4096..][..4096], filled(1));
    let check = Command::new(find_e2fs_program("e2fsck").unwrap()).arg("-fn").arg(&path).output();
    let check = check.unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));

    let again = Mounted::open(&path).unwrap();
    assert_eq!(again.number(FREE + 9), 9);
    // Its groups count from 1 again.
    assert_eq!(again.write(1, FREE, 8, true).0, 1);
    again.close();
}

#[test]
fn a_killed_process_leaves_a_prefix() {
    let (_dir, path) = new_image();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["image::the_process_that_is_killed", "--exact", "--nocapture"])
        .env(IMAGE, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut durable: Vec<u64> =
        lines.filter_map(|line| line.strip_prefix("durable ")?.parse().ok()).take(300).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    let durable = durable.pop().unwrap();
    assert!(side_folder(&path).join("head").exists());

    let mounted = Mounted::open(&path).unwrap();
    let found: Vec<u64> = (1..4000).map(|n| mounted.number(FREE + n)).collect();
    let prefix = found.iter().zip(1..).take_while(|(found, n)| **found == *n).count();
    assert!(prefix as u64 >= durable, "{durable} were durable, {prefix} are there");
    assert!(found[prefix..].iter().all(|n| *n == 0), "blocks after the first hole");
    mounted.set_dirty(false);
    mounted.close();
    assert!(!side_folder(&path).exists());
}

/// Not a test of its own: [`a_killed_process_leaves_a_prefix`] runs it in another process.
#[test]
fn the_process_that_is_killed() {
    let Some(path) = std::env::var_os(IMAGE) else { return };
    let mounted = Mounted::open(Path::new(&path)).unwrap();
    mounted.set_dirty(true);
    for n in 1.. {
        let seq = mounted.write(1, FREE + n % 4000, n, n % 10 == 0);
        if n % 10 == 0 {
            mounted.storage.wait_durable(StreamNo(1), seq).unwrap();
            println!("durable {n}");
        }
        assert!(n < 3900, "it was to be killed");
    }
}

#[test]
fn an_image_that_was_not_unmounted_needs_its_side_folder() {
    let (_dir, path) = new_image();
    let mounted = Mounted::open(&path).unwrap();
    mounted.set_dirty(true);
    mounted.close();
    let (side, moved) = (side_folder(&path), path.with_extension("moved"));
    fs::rename(&side, &moved).unwrap();
    let Err(ImageError::NoSideFolder { .. }) = Mounted::open(&path).map(drop) else {
        panic!("it was opened without its side folder");
    };
    fs::rename(&moved, &side).unwrap();

    let mounted = Mounted::open(&path).unwrap();
    mounted.set_dirty(false);
    // One process, one mount.
    let second = Mounted::open(&path).map(drop).unwrap_err().to_string();
    assert!(second.contains("in use"), "{second}");
    mounted.close();
}

#[test]
fn files_without_a_file_system_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.img");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    let error = Mounted::open(&path).map(drop).unwrap_err().to_string();
    assert!(error.contains("rio fs mkfs"), "{error}");
    assert!(!side_folder(&path).exists());
    assert!(matches!(Mounted::open(dir.path()).map(drop), Err(ImageError::NotFile { .. })));
}
