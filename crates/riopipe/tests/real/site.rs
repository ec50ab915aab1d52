//! Targets in this process, members, and blocks that contain their number and version.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use riopipe::{
    BLOCK_BYTES, ConnectOptions, CreateOptions, MemberAddr, OpenOptions, Place, Seq, Stream,
    SubmitError, SubmitErrorKind, Until,
};
use riopipe_target::{Config, Running, Target};
use tempfile::TempDir;

/// A target with these drives, and with a log in directory `log` if there is one.
pub(crate) fn target(drives: &[&str], log: Option<&TempDir>) -> Running {
    static TARGETS: AtomicU32 = AtomicU32::new(0);
    // Ports come from the system, so names can't come from the address.
    let number = TARGETS.fetch_add(1, Ordering::Relaxed);
    target_named(&format!("nqn.2026-01.org.example:target-{number}"), drives, log)
}

/// A target with this NQN, on which the drives' ids depend.
pub(crate) fn target_named(nqn: &str, drives: &[&str], log: Option<&TempDir>) -> Running {
    let mut config = Config::on_loopback(drives);
    config.subnqn = Some(nqn.to_owned());
    config.log = log.map(|dir| format!("file:{}/log,size=1M", dir.path().display()));
    Target::start(&config).expect("the target starts")
}

pub(crate) fn members(targets: &[&Running], drives: u32) -> Vec<MemberAddr> {
    let of = |t: &&Running| {
        let addr = t.addresses()[0];
        (1..=drives)
            .map(move |nsid| format!("{addr},ns={nsid}").parse().unwrap())
            .collect::<Vec<_>>()
    };
    targets.iter().flat_map(of).collect()
}

pub(crate) fn connect() -> ConnectOptions {
    ConnectOptions { timeout: Duration::from_secs(20), ..ConnectOptions::default() }
}

pub(crate) fn create_options() -> CreateOptions {
    CreateOptions { streams: 4, connect: connect(), ..CreateOptions::default() }
}

pub(crate) fn open_options() -> OpenOptions {
    OpenOptions { connect: connect(), ..OpenOptions::default() }
}

/// Fills a buffer with the content of block `lba` after write number `version`.
pub(crate) fn fill(bytes: &mut [u8], lba: u64, version: u64) {
    for (i, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
        block.fill((lba as u8).wrapping_add(i as u8).wrapping_mul(31) ^ version as u8);
        block[..8].copy_from_slice(&(lba + i as u64).to_le_bytes());
        block[8..16].copy_from_slice(&version.to_le_bytes());
    }
}

pub(crate) fn write(
    stream: &mut Stream,
    lba: u64,
    blocks: usize,
    version: u64,
    durable: bool,
) -> Seq {
    loop {
        let mut buf = stream.buf(blocks * BLOCK_BYTES).unwrap();
        fill(&mut buf, lba, version);
        let group = stream.group().write(lba, buf, Place::InPlace).tag(version);
        let result = if durable { group.submit_durable() } else { group.submit() };
        match result {
            Ok(seq) => return seq,
            Err(SubmitError { kind: SubmitErrorKind::Full(_), .. }) => {
                stream.wait(Until::Space, Some(Duration::from_secs(20))).unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

pub(crate) fn check(stream: &mut Stream, lba: u64, blocks: usize, version: u64) {
    let (mut is, mut should) = (vec![0; blocks * BLOCK_BYTES], vec![0; blocks * BLOCK_BYTES]);
    stream.read(lba, &mut is, None).unwrap();
    fill(&mut should, lba, version);
    assert!(is == should, "blocks {lba}+{blocks} hold version {version}");
}
