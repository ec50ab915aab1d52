//! Discovery against a scripted service.

use super::super::script::{Answer, le, page, respond};
use super::*;
use alloc::string::String;
use riopipe_nvme::digest::soft;
use riopipe_nvme::fabrics::DISCOVERY_NQN;
use std::format;
use std::string::ToString;
use std::vec;

type Payload = &'static [u8];

struct Service {
    genctr: u64,
    records: usize,
    /// Whether the log changes after the n-th read of records.
    changes: fn(u32) -> bool,
    reads: u32,
    claimed: Option<u64>,
    /// CSTS reports ready from this reading on.
    ready_after: u32,
}

fn record(generation: u64, i: usize) -> Vec<u8> {
    let mut b = vec![0; 1024];
    b[..10].copy_from_slice(&[3, 1, 2, 0, 1, 0, 0xff, 0xff, 32, 0]);
    b[32..36].copy_from_slice(b"4420");
    let nqn = format!("nqn.2026-01.io.example:{generation}.{i}");
    b[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
    b[512..521].copy_from_slice(b"127.0.0.1");
    b
}

impl Service {
    fn log(&self) -> Vec<u8> {
        let mut b = vec![0; 1024];
        b[..8].copy_from_slice(&self.genctr.to_le_bytes());
        let numrec = self.claimed.unwrap_or(self.records as u64);
        b[8..16].copy_from_slice(&numrec.to_le_bytes());
        for i in 0..self.records {
            b.extend(record(self.genctr, i));
        }
        b
    }

    fn answer(&mut self, sqe: &[u8]) -> Answer {
        match (sqe[0], sqe[4], le(sqe, 44, 4)) {
            (0x7f, 0x01, _) => Answer::Result(0x0001),
            (0x7f, 0x04, 0x00) => Answer::Result(0x0000_0020_0f01_001f),
            (0x7f, 0x04, 0x08) => Answer::Result(0x0002_0000),
            (0x7f, 0x00, 0x14) => Answer::Result(0),
            (0x7f, 0x04, 0x1c) if self.ready_after > 0 => {
                self.ready_after -= 1;
                Answer::Result(0)
            }
            (0x7f, 0x04, 0x1c) => Answer::Result(1),
            (0x06, _, _) => Answer::Data(page(&[(78, &[1, 0]), (111, &[2])])),
            (0x02, _, _) => {
                assert_eq!(sqe[40], 0x70);
                let dwords = le(sqe, 42, 2) | le(sqe, 44, 2) << 16;
                let (at, len) = (le(sqe, 48, 8) as usize, (dwords as usize + 1) * 4);
                let log = self.log();
                assert!(at + len <= log.len(), "only existing bytes are requested");
                if at > 0 {
                    self.reads += 1;
                    if (self.changes)(self.reads) {
                        self.genctr += 1;
                    }
                }
                Answer::Data(log[at..at + len].to_vec())
            }
            other => panic!("not expected: {other:x?}"),
        }
    }

    fn run(&mut self) -> Result<Vec<String>, AttachError> {
        let config = QpConfig::admin(
            "nqn.2014-08.org.nvmexpress:uuid:1".into(),
            [7; 16],
            DISCOVERY_NQN.into(),
            soft,
        );
        let mut discover: Discover<Payload> = Discover::new(config);
        let mut out = Outbox::new();
        discover.start(&mut out);
        let mut now = 0;
        for _ in 0..10_000 {
            if let Some(at) = discover.next_deadline() {
                now = at;
                discover.tick(now, &mut out);
            }
            let sent: Vec<u8> = out.slices().flatten().copied().collect();
            out.clear();
            let bytes = respond(&sent, |sqe| self.answer(sqe));
            assert_eq!(discover.receive(now, &bytes, &mut out)?, bytes.len());
            if let Some(entries) = discover.entries() {
                assert!(out.is_empty() && discover.next_deadline().is_none());
                return Ok(entries.iter().map(|e| e.subnqn.clone()).collect());
            }
        }
        panic!("it does not end");
    }
}

fn service(records: usize) -> Service {
    Service { genctr: 5, records, changes: |_| false, reads: 0, claimed: None, ready_after: 0 }
}

fn names(generation: u64, n: usize) -> Vec<String> {
    (0..n).map(|i| format!("nqn.2026-01.io.example:{generation}.{i}")).collect()
}

#[test]
fn any_number_of_records_is_read() {
    for n in [0, 1, 3, 4, 5, 9, 130] {
        assert_eq!(service(n).run().unwrap(), names(5, n));
    }
}

#[test]
fn a_slow_service_is_waited_for() {
    let mut s = service(3);
    s.ready_after = 5;
    assert_eq!(s.run().unwrap(), names(5, 3));
}

#[test]
fn a_log_that_changes_is_read_again() {
    // Nine records are three reads; the third already returns the change.
    let mut s = service(9);
    s.changes = |n| n == 2;
    let got = s.run().unwrap();
    assert_eq!(got, names(s.genctr, 9), "all records are of one generation");
    assert!(s.genctr > 5, "the change was really met");

    let mut s = service(9);
    s.changes = |n| n % 2 == 0;
    assert_eq!(
        s.run().unwrap_err().to_string(),
        "the discovery log changed 11 times while it was read; try again"
    );
}

/// T18: a count that would fill memory.
#[test]
fn t18_absurd_counts_are_refused() {
    let mut s = service(1);
    s.claimed = Some(u64::MAX);
    assert!(s.run().unwrap_err().to_string().contains("more than 4096 records"));
}
