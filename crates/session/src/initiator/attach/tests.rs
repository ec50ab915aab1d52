//! Attaching to a scripted target.

use super::super::script::{Answer, le, page, respond};
use super::*;
use riopipe_nvme::command::Status;
use riopipe_nvme::digest::soft;
use riopipe_order::write_order::DriveOrder;
use std::string::ToString;
use std::vec;

type Payload = &'static [u8];

const SUBNQN: &[u8] = b"nqn.2026-01.io.example:drives";

fn config() -> QpConfig {
    QpConfig::admin(
        "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        [7; 16],
        "nqn.2026-01.io.example:drives".into(),
        soft,
    )
}

/// An ordinary controller with namespaces 1 and 5: two queues, 32 KiB in a capsule, MDTS 1 MiB,
/// a volatile cache.
struct Target {
    /// CSTS reports ready from this reading on.
    ready_after: u32,
    /// CSTS from then on.
    ready: u64,
    /// The value of CAP.
    cap: u64,
    version: u32,
    controller: Vec<u8>,
    namespace: Vec<u8>,
    log: Vec<(u8, u64)>,
}

impl Target {
    fn new() -> Self {
        Self {
            ready_after: 0,
            ready: 1,
            cap: 0x0000_0020_0201_00ff,
            version: 0x0002_0000,
            controller: page(&[
                (4, b"SN42                "),
                (24, b"Somebody's target                       "),
                (64, b"9.9     "),
                (77, &[8]),
                (78, &[0x03, 0x02]),
                (80, &[0, 0, 2, 0]),
                (111, &[1]),
                (320, &[10, 0]),
                (512, &[0x66, 0x44, 100, 0]),
                (516, &[8, 0, 0, 0]),
                (520, &[0x0c, 0]),
                (525, &[7]),
                (536, &[1, 0, 0x10, 0]),
                (768, SUBNQN),
                (1792, &[0x04, 0x08, 0, 0]),
                (1796, &[1, 0, 0, 0]),
            ]),
            namespace: page(&[(0, &[0, 0, 1]), (104, &[9; 16]), (128, &[0, 0, 12, 0])]),
            log: Vec::new(),
        }
    }

    fn answer(&mut self, sqe: &[u8]) -> Answer {
        let key = match sqe[0] {
            0x7f => le(sqe, 44, 4),
            0x06 => le(sqe, 4, 4) << 8 | u64::from(sqe[40]),
            _ => u64::from(sqe[40]),
        };
        self.log.push((if sqe[0] == 0x7f { 0x70 | sqe[4] } else { sqe[0] }, key));
        match (sqe[0], sqe[4], key) {
            (0x7f, 0x01, _) => Answer::Result(0x0203),
            (0x7f, 0x04, 0x00) => Answer::Result(self.cap),
            (0x7f, 0x04, 0x08) => Answer::Result(u64::from(self.version)),
            (0x7f, 0x00, 0x14) => {
                assert_eq!(le(sqe, 48, 8), 0x0046_0001, "EN, 64-byte and 16-byte entries");
                Answer::Result(0)
            }
            (0x7f, 0x04, 0x1c) if self.ready_after == 0 => Answer::Result(self.ready),
            (0x7f, 0x04, 0x1c) => {
                self.ready_after -= 1;
                Answer::Result(0)
            }
            (0x06, _, 0x01) => Answer::Data(self.controller.clone()),
            (0x09, _, 0x07) => {
                assert_eq!(le(sqe, 44, 4), 0x0003_0003, "four queues, less one");
                Answer::Result(0x0001_0002)
            }
            (0x06, _, 0x02) => Answer::Data(page(&[(0, &[1, 0, 0, 0, 5, 0, 0, 0])])),
            (0x06, _, 0x0100 | 0x0500) => Answer::Data(self.namespace.clone()),
            (0x06, _, 0x0103) => Answer::Data(page(&[(0, &[3, 16, 0, 0]), (4, &[0xab; 16])])),
            (0x06, _, 0x0503) => Answer::Status(0x002),
            other => panic!("not expected: {other:x?}"),
        }
    }

    /// Exchanges PDUs until none is sent any more, or an error; time passes when the host waits for
    /// it.
    fn run(&mut self) -> Result<Attach<Payload>, AttachError> {
        let mut attach: Attach<Payload> = Attach::new(config(), 4);
        let mut out = Outbox::new();
        let mut now = 1_000;
        attach.start(&mut out);
        for _ in 0..10_000 {
            let sent: Vec<u8> = out.slices().flatten().copied().collect();
            out.clear();
            if sent.is_empty() {
                match attach.next_deadline() {
                    Some(at) => {
                        assert!(at > now, "a deadline that has passed would spin");
                        attach.tick(at - 1, &mut out);
                        assert!(out.is_empty(), "too early");
                        now = at;
                        attach.tick(now, &mut out);
                        continue;
                    }
                    None => return Ok(attach),
                }
            }
            let bytes = respond(&sent, |sqe| self.answer(sqe));
            // In two parts: a cut makes no difference.
            let cut = bytes.len() / 2;
            let used = attach.receive(now, &bytes[..cut], &mut out)?;
            let used = used + attach.receive(now, &bytes[used..], &mut out)?;
            assert_eq!(used, bytes.len());
        }
        panic!("it does not end");
    }

    fn refused(mut self) -> String {
        self.run().expect_err("it must be refused").to_string()
    }
}

#[test]
fn attaching_sends_its_commands_in_order_and_reads_everything() {
    let mut target = Target::new();
    let attach = target.run().unwrap();
    assert!(attach.is_attached());
    let (qp, controller) = attach.finish().unwrap();
    assert!(qp.is_ready() && qp.in_flight() == 0, "the admin queue goes on");
    let namespace = |nsid, uuid| Namespace {
        order: DriveOrder::None,
        nsid,
        blocks: 0x10000,
        block_size: 4096,
        metadata: 0,
        read_only: false,
        nguid: [9; 16],
        uuid,
    };
    assert_eq!(
        controller,
        Controller {
            cntlid: 0x0203,
            version: 0x0002_0000,
            subnqn: "nqn.2026-01.io.example:drives".into(),
            serial: "SN42".into(),
            model: "Somebody's target".into(),
            firmware: "9.9".into(),
            mdts_bytes: 1 << 20,
            in_capsule_bytes: 32768,
            vwc: true,
            kas: 10,
            sqsize_max: 101,
            queues: 2,
            nn: 8,
            write_zeroes: true,
            deallocate: true,
            extension: None,
            namespaces: vec![namespace(1, Some([0xab; 16])), namespace(5, None)],
        }
    );
    let want: [(u8, u64); 12] = [
        (0x71, 0),
        (0x74, 0x00),
        (0x74, 0x08),
        (0x70, 0x14),
        (0x74, 0x1c),
        (0x06, 0x01),
        (0x09, 0x07),
        (0x06, 0x02),
        (0x06, 0x0100),
        (0x06, 0x0103),
        (0x06, 0x0500),
        (0x06, 0x0503),
    ];
    let log: Vec<_> = target.log.iter().map(|&(c, k)| (c, if c == 0x71 { 0 } else { k })).collect();
    assert_eq!(log, want);
}

#[test]
fn a_slow_controller_is_waited_for_and_a_dead_one_is_not() {
    let mut target = Target::new();
    target.ready_after = 20;
    assert!(target.run().unwrap().is_attached());
    assert_eq!(target.log.iter().filter(|&&c| c == (0x74, 0x1c)).count(), 21);

    let mut target = Target::new();
    target.ready_after = u32::MAX;
    let e = target.run().unwrap_err();
    assert_eq!(e, AttachError::NotReady { ms: 1000 }, "CAP.TO is 2 × 500 ms");

    let mut target = Target::new();
    target.ready = 2;
    assert_eq!(target.run().unwrap_err(), AttachError::Fatal, "CSTS.CFS");
}

#[test]
fn capabilities_are_decoded_bit_by_bit() {
    let with = |change: fn(&mut Target)| {
        let mut target = Target::new();
        change(&mut target);
        target.run().unwrap().finish().unwrap().1
    };
    // Other bits of the same fields have other meanings.
    assert!(!with(|t| t.controller[525] = 6).vwc);
    let can = |c: Controller| (c.write_zeroes, c.deallocate);
    assert_eq!(can(with(|t| t.controller[520] = 0x04)), (false, true));
    assert_eq!(can(with(|t| t.controller[520] = 0x08)), (true, false));
    assert_eq!(can(with(|t| t.controller[520] = 0xf3)), (false, false));
    // The length of queues is limited by CAP and by the number of commands.
    assert_eq!(with(|t| t.cap = 0x0000_0020_0201_001f).sqsize_max, 32);
    assert_eq!(with(|t| t.controller[514] = 0).sqsize_max, 256, "MAXCMD is not reported");
    // A capsule with space for an entry and nothing else.
    assert_eq!(with(|t| t.controller[1792..1794].copy_from_slice(&[4, 0])).in_capsule_bytes, 0);
    // Command sets: NVM, or those that Identify lists.
    assert_eq!(with(|t| t.cap = 0x0000_0800_0201_00ff).cntlid, 0x0203);
    for css in [0x00, 0x02, 0x80] {
        let mut target = Target::new();
        target.cap = css << 37 | 0x0201_00ff;
        assert!(target.refused().contains("no NVM command set"), "{css:#x}");
    }
}

#[test]
fn old_controllers_have_no_descriptors() {
    let mut target = Target::new();
    target.version = 0x0001_0201;
    let (_, controller) = target.run().unwrap().finish().unwrap();
    assert_eq!(controller.namespaces.len(), 2);
    assert!(target.log.iter().all(|&(c, k)| c != 6 || k & 0xff != 3));
    target.version = 0x0001_0300;
    let (_, controller) = target.run().unwrap().finish().unwrap();
    assert_eq!(controller.namespaces[0].uuid, Some([0xab; 16]), "from 1.3 on they do");
}

#[test]
fn the_extension_is_found() {
    let mut target = Target::new();
    target.controller[3072..3084].copy_from_slice(b"RIOPIPE\x01\x01\x00\x01\x00");
    target.controller[3084] = 9;
    let (_, controller) = target.run().unwrap().finish().unwrap();
    assert_eq!(controller.extension.map(|e| e.incarnation), Some(9));
}

#[test]
fn unusable_controllers_are_refused_with_the_reason() {
    let with = |at: usize, bytes: &[u8]| {
        let mut target = Target::new();
        target.controller[at..at + bytes.len()].copy_from_slice(bytes);
        target.refused()
    };
    assert!(with(78, &[9]).contains("another controller id"));
    assert!(with(111, &[2]).contains("discovery controller"));
    assert!(with(536, &[0, 0, 0, 0]).contains("does not take SGLs"));
    assert!(with(1792, &[3, 0]).contains("capsules are too small"));
    assert!(with(1796, &[0]).contains("capsules are too small"));
    assert!(with(1800, &[1]).contains("does not begin at 0"));
    let namespace = |at: usize, bytes: &[u8]| {
        let mut target = Target::new();
        target.namespace[at..at + bytes.len()].copy_from_slice(bytes);
        target.refused()
    };
    assert_eq!(
        namespace(130, &[8]),
        "namespace 1 is not usable: its block size is below 512 bytes or beyond 2 GiB"
    );
    assert!(namespace(130, &[200]).contains("block size"));
    assert!(namespace(0, &[0; 8]).contains("it has no blocks"));
    assert!(namespace(0, &[0xff; 8]).contains("more than 2^64 bytes"));
}

#[test]
fn commands_that_fail_are_named() {
    struct Failing(u8, u8, u16);
    for (failing, want) in [
        (
            Failing(0x7f, 0x04, 0x001),
            "reading the capabilities (CAP) failed: invalid command opcode (0/01h)",
        ),
        (Failing(0x06, 0, 0x006), "identify controller failed: internal error (0/06h)"),
        (Failing(0x09, 0, 0x002), "asking for I/O queues failed: invalid field in command (0/02h)"),
    ] {
        let mut target = Target::new();
        let mut attach: Attach<Payload> = Attach::new(config(), 4);
        let mut out = Outbox::new();
        attach.start(&mut out);
        let e = loop {
            let sent: Vec<u8> = out.slices().flatten().copied().collect();
            assert!(!sent.is_empty());
            out.clear();
            let bytes = respond(&sent, |sqe| {
                let same = sqe[0] == failing.0 && (sqe[0] != 0x7f || sqe[4] == failing.1);
                if same { Answer::Status(failing.2) } else { target.answer(sqe) }
            });
            if let Err(e) = attach.receive(0, &bytes, &mut out) {
                break e;
            }
        };
        assert_eq!(e.to_string(), want);
        assert!(matches!(e, AttachError::Failed { status, .. } if status == Status(failing.2)));
        assert!(attach.finish().is_none());
    }
    let mut target = Target::new();
    target.version = 0;
    assert!(target.run().unwrap().is_attached());
}

/// T18: a list that goes in circles, and more namespaces than any controller has.
#[test]
fn t18_namespace_lists_end() {
    let list = |answer: fn(u64) -> Vec<u8>| {
        let mut target = Target::new();
        let mut attach: Attach<Payload> = Attach::new(config(), 4);
        let mut out = Outbox::new();
        attach.start(&mut out);
        for _ in 0..100 {
            let sent: Vec<u8> = out.slices().flatten().copied().collect();
            out.clear();
            let bytes = respond(&sent, |sqe| match (sqe[0], sqe[40]) {
                (0x06, 0x02) => Answer::Data(answer(le(sqe, 4, 4))),
                _ => target.answer(sqe),
            });
            if let Err(e) = attach.receive(0, &bytes, &mut out) {
                return e.to_string();
            }
            if attach.is_attached() {
                return "attached".into();
            }
        }
        panic!("it does not end");
    };
    assert!(list(|_| (1..=1024u32).flat_map(u32::to_le_bytes).collect()).contains("ascend"));
    assert!(
        list(|after| (1..=1024u32).flat_map(|i| (after as u32 + i).to_le_bytes()).collect())
            .contains("more than 1024")
    );
    assert_eq!(list(|_| vec![0; 4096]), "attached", "no namespace is no error");
}
