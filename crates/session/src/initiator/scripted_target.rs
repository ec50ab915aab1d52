//! A scripted target with a controller, two drives and a volume on them, and the shell around an
//! association. The tests of [`association`](super::association) and [`manager`](super::manager)
//! use it.

use alloc::vec::Vec;
use std::vec;

use riopipe_nvme::digest::soft;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::LogKind;

use super::association::{AssociationConfig, ConnectFailure, ControlQueue};
use super::endpoint::Endpoint;
use super::script::{Answer, completion, le, page, respond};
use crate::label::{LABEL_LEN, Label, MemberId};
use crate::wire::{ADMIN_CLAIM, ADMIN_RELEASE, Extension};

pub(super) type Payload = &'static [u8];

pub(super) const NQN: &str = "nqn.2026-01.io.example:drives";
pub(super) const VOLUME: VolumeId = VolumeId([7; 16]);
pub(super) const MS: u64 = 1_000_000;
/// Status *Connect Invalid Parameters*, and another that does not pass.
pub(super) const CONNECT_INVALID: u16 = 0x182;
pub(super) const INVALID_HOST: u16 = 0x184;

pub(super) fn config() -> AssociationConfig {
    AssociationConfig {
        host_nqn: "nqn.2014-08.org.nvmexpress:uuid:1".into(),
        host_id: [7; 16],
        secrets: None,
        subnqn: Some(NQN.into()),
        keep_alive_ms: 300,
        report_ns: None,
        header_digest: false,
        data_digest: None,
        crc: soft,
        data_max: 1 << 20,
        io_queues: 4,
        answer_ns: 1000 * MS,
    }
}

/// The label of a drive of the volume, by its namespace.
pub(super) fn label(nsid: u32, generation: u32) -> Label {
    Label {
        volume: VOLUME,
        name: "v".into(),
        block_size: 4096,
        unit_blocks: 8,
        data_blocks: 900,
        prepare_blocks: 0,
        streams: 1,
        engine: EngineKind::Rio,
        index: nsid as u16,
        generation,
        sequence: 1,
        members: vec![MemberId { nguid: [1; 16], region: [3; 16] }; 3],
    }
}

pub(super) struct ScriptedTarget {
    /// Whether connections can be made.
    pub(super) up: bool,
    pub(super) region: [u8; 16],
    pub(super) generation: u32,
    /// The subsystems that discovery lists.
    pub(super) subsystems: Vec<&'static str>,
    /// It answers no admin command after the bring-up; `true`: except Keep Alive.
    pub(super) mute: Option<bool>,
    /// The statuses with which queue 1 is refused, one after the other.
    pub(super) refusals: Vec<u16>,
    /// The status of a read of the label.
    pub(super) label_status: u16,
    /// The statuses of the answers to claims, one after the other; later claims succeed.
    pub(super) claims: Vec<u16>,
    /// The status of a release; `None`: it succeeds.
    pub(super) refuse_release: Option<u16>,
    /// Opcodes of the commands since the bring-up.
    pub(super) asked: Vec<u8>,
    /// Commands without an answer.
    pub(super) withheld: Vec<Vec<u8>>,
    /// The number of Keep Alive commands.
    pub(super) kept_alive: usize,
    /// If it demands authentication: the number of commands of it that are answered. Its message is not valid.
    pub(super) authentication: Option<usize>,
    /// The ids of the queues that were connected.
    pub(super) connects: Vec<u16>,
    /// The digest flags of the last ICReq.
    pub(super) digests: u8,
    /// The connection that is being answered leads to its discovery service.
    pub(super) discovering: bool,
}

impl ScriptedTarget {
    pub(super) fn new() -> Self {
        Self {
            up: true,
            region: [3; 16],
            generation: 5,
            subsystems: vec![NQN],
            mute: None,
            refusals: Vec::new(),
            label_status: 0,
            claims: Vec::new(),
            refuse_release: None,
            asked: Vec::new(),
            withheld: Vec::new(),
            kept_alive: 0,
            authentication: None,
            connects: Vec::new(),
            digests: 0,
            discovering: false,
        }
    }

    fn controller(&self) -> Vec<u8> {
        let mut controller = page(&[
            (77, &[8]),
            (78, &[0x03, 0x02]),
            (80, &[0, 0, 2, 0]),
            (111, &[if self.discovering { 2 } else { 1 }]),
            (320, &[10, 0]),
            (512, &[0x66, 0x44, 100, 0]),
            (516, &[2, 0, 0, 0]),
            (520, &[0x0c, 0]),
            (536, &[1, 0, 0x10, 0]),
            (768, NQN.as_bytes()),
            (1792, &[0x04, 0x08, 0, 0]),
            (1796, &[1, 0, 0, 0]),
        ]);
        let extension = Extension {
            version: 1,
            log_kind: Some(LogKind::Dax),
            log_in_memory: false,
            incarnation: 1,
            region: self.region,
            boot: [9; 16],
        };
        extension.put(&mut controller);
        controller
    }

    fn discovery_log(&self) -> Vec<u8> {
        let mut log = vec![0; 1024];
        log[8] = self.subsystems.len() as u8;
        for nqn in &self.subsystems {
            let mut record = vec![0; 1024];
            record[..10].copy_from_slice(&[3, 1, 2, 0, 1, 0, 0xff, 0xff, 32, 0]);
            record[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
            log.extend(record);
        }
        log
    }

    fn bring_up(&mut self, sqe: &[u8]) -> Answer {
        match (sqe[0], sqe[4], le(sqe, 40, 4)) {
            // Connect: the queue's id is in dword 10.
            (0x7f, 0x01, dword) => self.connect((dword >> 16) as u16),
            (0x7f, 0x04, _) => match le(sqe, 44, 4) {
                0x00 => Answer::Result(0x0000_0020_0201_00ff),
                0x08 => Answer::Result(0x0001_0000),
                _ => Answer::Result(1),
            },
            (0x7f, kind @ (0x05 | 0x06), _) => match &mut self.authentication {
                Some(0) => Answer::Withheld,
                Some(left) => {
                    *left -= 1;
                    if kind == 0x06 { Answer::Data(vec![0xff; 4096]) } else { Answer::Result(0) }
                }
                None => panic!("not expected: {kind:#x}"),
            },
            (0x7f, ..) => Answer::Result(0),
            (0x09, ..) => Answer::Result(0x0003_0003),
            (0x06, _, 0x02) => Answer::Data(page(&[(0, &[1, 0, 0, 0, 2, 0, 0, 0])])),
            (0x06, _, 0x01) => Answer::Data(self.controller()),
            (0x06, ..) => {
                Answer::Data(page(&[(0, &[0, 0, 1]), (104, &[9; 16]), (128, &[0, 0, 12, 0])]))
            }
            (opcode, ..) => panic!("not expected: {opcode:#x}"),
        }
    }

    fn connect(&mut self, qid: u16) -> Answer {
        self.connects.push(qid);
        if qid == 1 && !self.refusals.is_empty() {
            return Answer::Status(self.refusals.remove(0));
        }
        let must_authenticate = u64::from(self.authentication.is_some()) << 17;
        Answer::Result(0x0203 | must_authenticate)
    }

    fn answer(&mut self, queue: ControlQueue, sqe: &[u8]) -> Answer {
        match (queue, sqe[0]) {
            (_, 0x7f | 0x06 | 0x09) => return self.bring_up(sqe),
            (ControlQueue::Discovery, _) => {
                let dwords = le(sqe, 42, 2) | le(sqe, 44, 2) << 16;
                let (at, len) = (le(sqe, 48, 8) as usize, (dwords as usize + 1) * 4);
                return Answer::Data(self.discovery_log()[at..at + len].to_vec());
            }
            (ControlQueue::Admin, 0x18) => self.kept_alive += 1,
            (_, opcode) => self.asked.push(opcode),
        }
        let answers = match self.mute {
            Some(keeps_alive) => keeps_alive && sqe[0] == 0x18,
            None => true,
        };
        match (queue, sqe[0]) {
            _ if !answers => {
                self.withheld.push(sqe.to_vec());
                Answer::Withheld
            }
            (ControlQueue::Drives, 0x02) if self.label_status != 0 => {
                Answer::Status(self.label_status)
            }
            (ControlQueue::Drives, 0x02) => {
                let mut labels = vec![0; 2 * LABEL_LEN];
                let label = label(le(sqe, 4, 4) as u32, self.generation).encode(soft);
                labels[..LABEL_LEN].copy_from_slice(&label);
                Answer::Data(labels)
            }
            (_, ADMIN_CLAIM) if !self.claims.is_empty() => Answer::Status(self.claims.remove(0)),
            (_, ADMIN_RELEASE) if self.refuse_release.is_some() => {
                Answer::Status(self.refuse_release.unwrap_or_default())
            }
            _ => Answer::Result(u64::from(sqe[0])),
        }
    }

    /// The answer to these bytes.
    pub(super) fn respond(&mut self, queue: ControlQueue, sent: &[u8]) -> Vec<u8> {
        self.discovering = queue == ControlQueue::Discovery;
        if sent.first() == Some(&0) {
            self.digests = sent[11];
        }
        respond(sent, |sqe| self.answer(queue, sqe))
    }

    /// The late answer to the first command that was withheld.
    pub(super) fn late(&mut self) -> Vec<u8> {
        let sqe = self.withheld.remove(0);
        completion(&sqe, u64::from(sqe[0]), 0)
    }
}

/// Carries bytes and makes connections, without any time passing, until nothing more happens.
pub(super) fn carry(
    driven: &mut impl Endpoint<Piece = Payload>,
    target: &mut ScriptedTarget,
    now: u64,
) {
    for _ in 0..10_000 {
        let mut moved = false;
        for queue in ControlQueue::ALL {
            let sent: Vec<u8> = driven.outbox(queue).slices().flatten().copied().collect();
            driven.outbox(queue).consume(sent.len());
            if !driven.is_open(queue) || sent.is_empty() {
                continue;
            }
            moved = true;
            if !target.up {
                continue;
            }
            let bytes = target.respond(queue, &sent);
            let used = driven.received(queue, &bytes, now);
            assert_eq!(used, bytes.len());
        }
        if let Some(connection) = driven.wants_connection() {
            moved = true;
            if target.up {
                driven.connected(connection, true, now);
            } else {
                let refused = ConnectFailure("nothing listens there".into());
                driven.connect_failed(connection, refused, now);
            }
        }
        if !moved {
            return;
        }
    }
    panic!("it does not come to rest");
}

/// Lets time pass until `until`, with a call at every deadline.
pub(super) fn pass(
    driven: &mut impl Endpoint<Piece = Payload>,
    target: &mut ScriptedTarget,
    now: &mut u64,
    until: u64,
) {
    carry(driven, target, *now);
    let mut same = 0;
    while let Some(at) = driven.deadline().filter(|at| *at <= until) {
        same = if at <= *now { same + 1 } else { 0 };
        assert!(same < 10, "a deadline that has passed would spin");
        *now = at.max(*now);
        driven.timeout(*now);
        carry(driven, target, *now);
    }
    *now = until;
}
