//! Targets as plain models: partitions of listed entries, drives of numbered contents with and
//! without a cache, claims and settlements as docs/wire-format.md describes them.

use std::collections::BTreeMap;

use riopipe_nvme::command::{Sqe, Status, opcode};
use riopipe_order::attribute::{Attribute, Flags, GroupTag, Kind, Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::entry::Position;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::recovery::ListedEntry;
use riopipe_session::claim::Intent;
use riopipe_session::initiator::opening::{
    Call, Mode, Opening, OpeningConfig, OpeningError, OpeningMember, OpeningServer, Outcome, Phase,
    Ticket,
};
use riopipe_session::wire::list::{PAGE_BYTES_MAX, Page, Settle, capacity};
use riopipe_session::wire::{self, Claim, VolumeStatus, status};

pub(crate) const VOLUME: VolumeId = VolumeId([7; 16]);
/// The data area of every drive.
pub(crate) const START: u64 = 256;
pub(crate) const BLOCKS: u64 = 10_000;
/// The blocks of the prepare area before it.
pub(crate) const PREPARE: u32 = 100;
/// The content of a deallocated block: anything (T10).
pub(crate) const JUNK: u32 = 0xdead;

/// A small generator, so that runs can be repeated.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) as usize % n.max(1)
    }
}

/// A drive; blocks that are not there hold 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Drive {
    pub(crate) volatile: bool,
    pub(crate) medium: BTreeMap<u64, u32>,
    pub(crate) cache: BTreeMap<u64, u32>,
}

impl Drive {
    pub(crate) fn write(&mut self, lba: u64, content: u32) {
        if self.volatile { &mut self.cache } else { &mut self.medium }.insert(lba, content);
    }

    fn flush(&mut self) {
        self.medium.append(&mut self.cache);
    }

    /// Leaves any subset of the blocks that are not flushed (M3).
    pub(crate) fn power_cut(&mut self, random: &mut Random) {
        for (lba, content) in std::mem::take(&mut self.cache) {
            if random.below(2) == 0 {
                self.medium.insert(lba, content);
            }
        }
    }

    pub(crate) fn reads(&self, lba: u64) -> u32 {
        self.cache.get(&lba).or_else(|| self.medium.get(&lba)).copied().unwrap_or(0)
    }
}

/// A target's part of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Partition {
    pub(crate) released: Seq,
    pub(crate) newest_tag: GroupTag,
    pub(crate) settled: bool,
    pub(crate) torn: u32,
    pub(crate) entries: Vec<ListedEntry>,
    /// The generation of the owner that has started it last.
    pub(crate) generation: u32,
    /// It can't be read.
    pub(crate) damaged: bool,
    /// Carried by a connection of the owner.
    pub(crate) bound: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) known: bool,
    pub(crate) unlogged: bool,
    pub(crate) log_lost: bool,
    /// The generation with which the log was given up.
    pub(crate) given_up: u32,
    pub(crate) generation: u32,
    /// The initiator that owns the volume, and whether it still runs.
    pub(crate) owner: Option<(u32, bool)>,
    pub(crate) partitions: Vec<Partition>,
    /// By namespace id.
    pub(crate) drives: BTreeMap<u32, Drive>,
    /// How many of the next commands it answers with *busy* before it carries out any.
    pub(crate) busy: u32,
    /// It reports that entries wait for recovery which its lists do not show.
    pub(crate) hides: bool,
    /// The status with which it answers commands with this opcode.
    pub(crate) refuses: Option<(u8, Status)>,
}

impl Target {
    fn is_damaged(&self) -> bool {
        self.partitions.iter().any(|partition| partition.damaged)
    }

    fn unsettled(&self) -> u32 {
        let parts = self.partitions.iter().filter(|p| !p.settled);
        parts.map(|p| p.entries.len() as u32 + p.torn).sum()
    }

    fn owned_by(&self, initiator: u32) -> Result<(), Status> {
        let own = self.owner.is_some_and(|(owner, _)| owner == initiator);
        if own { Ok(()) } else { Err(status::NOT_OWNER.with_dnr()) }
    }

    fn handle(&mut self, initiator: u32, call: &Call) -> Result<Vec<u8>, Status> {
        let (sqe, send, receive) = match call {
            Call::Admin { sqe, send, receive } => (sqe, &send[..], *receive),
            Call::Io { sqe, send, receive } => (sqe, &send[..], *receive),
        };
        if self.busy > 0 {
            self.busy -= 1;
            return Err(status::STREAM_BUSY);
        }
        if let Some((opcode, status)) = self.refuses
            && opcode == sqe.opcode()
        {
            return Err(status);
        }
        let done = match (call, sqe.opcode()) {
            (Call::Admin { .. }, wire::ADMIN_STATUS) => Ok(self.status(initiator).encode()),
            (Call::Admin { .. }, wire::ADMIN_CLAIM) => {
                self.claim(initiator, &Claim::decode(send).unwrap())
            }
            (Call::Admin { .. }, wire::ADMIN_LIST) => self.list(initiator, sqe),
            (Call::Admin { .. }, wire::ADMIN_SETTLE) => {
                self.settle(initiator, &Settle::decode(send).unwrap())
            }
            (Call::Io { .. }, opcode::WRITE_ZEROES) => self.zero(initiator, sqe),
            (Call::Io { .. }, opcode::READ) => {
                let drive = &self.drives[&sqe.nsid()];
                let blocks = sqe.slba()..sqe.slba() + u64::from(sqe.nlb());
                Ok(blocks.flat_map(|lba| block_of(drive.reads(lba))).collect())
            }
            (Call::Io { .. }, opcode::WRITE) => self.write(initiator, sqe, send),
            (Call::Io { .. }, opcode::FLUSH) => {
                self.drives.get_mut(&sqe.nsid()).unwrap().flush();
                Ok(Vec::new())
            }
            other => panic!("{other:?}"),
        };
        assert!(done.as_ref().is_err() || done.as_ref().is_ok_and(|data| data.len() == receive));
        done
    }

    fn status(&self, initiator: u32) -> VolumeStatus {
        VolumeStatus {
            volume: VOLUME,
            generation: self.generation,
            known: self.known,
            owned: self.owner.is_some_and(|(_, lives)| lives),
            own: self.owner.is_some_and(|(owner, _)| owner == initiator),
            unrecovered: self.unsettled() > 0 || self.hides,
            log_lost: self.log_lost || self.is_damaged(),
            damaged: self.is_damaged(),
            unlogged: self.unlogged,
            streams: self.partitions.len() as u16,
            slots: 4096,
            live_entries: self.unsettled(),
            owner: "nqn.other".into(),
            released: self.partitions.iter().map(|p| p.released).collect(),
            ..VolumeStatus::default()
        }
    }

    fn claim(&mut self, initiator: u32, claim: &Claim) -> Result<Vec<u8>, Status> {
        if self.owner.is_some_and(|(owner, lives)| lives && owner != initiator) && !claim.take_over
        {
            return Err(status::OWNED);
        }
        if claim.generation <= self.generation {
            return Err(status::STALE_GENERATION.with_dnr());
        }
        assert_eq!(claim.create, !claim.unlogged && (!self.known || self.unlogged));
        if claim.create {
            (self.known, self.unlogged) = (true, false);
            self.partitions = vec![Partition::default(); usize::from(claim.streams)];
        }
        if claim.give_up {
            self.given_up = claim.generation;
            let damaged = self.partitions.iter_mut().filter(|partition| partition.damaged);
            damaged.for_each(|partition| *partition = Partition::default());
        }
        assert!(!claim.resume && !claim.members.is_empty());
        self.generation = claim.generation;
        self.owner = Some((initiator, true));
        for partition in &mut self.partitions {
            partition.bound = false;
        }
        Ok(Vec::new())
    }

    fn list(&self, initiator: u32, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        let wire::ListRequest { stream, from, len } = wire::list_request(sqe);
        assert!(len <= PAGE_BYTES_MAX && len.is_multiple_of(64));
        if self.owner.is_some_and(|(_, lives)| lives) {
            self.owned_by(initiator)?;
        }
        let partition = &self.partitions[usize::from(stream.0)];
        if partition.bound {
            return Err(status::STREAM_BUSY);
        }
        if partition.damaged {
            return Err(status::LOG_LOST.with_dnr());
        }
        let rest: Vec<ListedEntry> =
            partition.entries.iter().copied().filter(|e| e.position >= from).collect();
        let entries = rest[..rest.len().min(capacity(len))].to_vec();
        let page = Page {
            volume: VOLUME,
            stream,
            more: entries.len() < rest.len(),
            settled: partition.settled,
            in_doubt: self.given_up > partition.generation,
            released: partition.released,
            newest_tag: partition.newest_tag,
            next: entries.last().map_or(from, |last| Position(last.position.0 + 1)),
            torn: partition.torn,
            live: partition.entries.len() as u32,
            entries,
        };
        Ok(page.encode(len))
    }

    fn settle(&mut self, initiator: u32, settle: &Settle) -> Result<Vec<u8>, Status> {
        self.owned_by(initiator)?;
        self.hides = false;
        if settle.generation != self.generation {
            return Err(status::STALE_GENERATION.with_dnr());
        }
        for one in &settle.streams {
            let partition = &mut self.partitions[usize::from(one.stream.0)];
            if partition.bound {
                return Err(status::STREAM_BUSY);
            }
            let in_doubt = self.given_up > partition.generation;
            if partition.settled && partition.released != one.k && !in_doubt {
                return Err(status::SETTLED.with_dnr());
            }
            if one.k < partition.released {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            if !partition.settled || partition.released != one.k {
                partition.settled = true;
                partition.released = one.k;
                partition.newest_tag = GroupTag::new(one.k, one.tag);
                partition.entries.retain(|e| e.attribute.seq_end() > one.k);
            }
            if !one.keep {
                partition.entries.clear();
                partition.torn = 0;
            }
        }
        Ok(Vec::new())
    }

    fn write(&mut self, initiator: u32, sqe: &Sqe, send: &[u8]) -> Result<Vec<u8>, Status> {
        self.owned_by(initiator)?;
        assert_eq!(send.len(), sqe.nlb() as usize * 4096);
        let drive = self.drives.get_mut(&sqe.nsid()).unwrap();
        for (lba, block) in (sqe.slba()..).zip(send.chunks(4096)) {
            assert!((START..START + BLOCKS).contains(&lba), "only data blocks are copied");
            drive.write(lba, u32::from_le_bytes(block[..4].try_into().unwrap()));
        }
        Ok(Vec::new())
    }

    fn zero(&mut self, initiator: u32, sqe: &Sqe) -> Result<Vec<u8>, Status> {
        self.owned_by(initiator)?;
        let drive = self.drives.get_mut(&sqe.nsid()).unwrap();
        for lba in sqe.slba()..sqe.slba() + u64::from(sqe.nlb()) {
            assert!((START..START + BLOCKS).contains(&lba), "a label is never undone");
            drive.write(lba, if sqe.deac() { JUNK } else { 0 });
        }
        Ok(Vec::new())
    }
}

/// A write of the history: one entry, whether the log has it, and whether the log shows it durable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Past {
    pub(crate) stream: u16,
    pub(crate) attribute: Attribute,
    pub(crate) durable: bool,
}

/// Two drives a server.
pub(crate) fn server_of(member: u8) -> usize {
    usize::from(member) / 2
}

pub(crate) fn nsid_of(member: u8) -> u32 {
    10 + u32::from(member)
}

/// A write of one block of a group; blocks count from the data area's start.
pub(crate) fn entry(seq: u64, member: u8, lba: u64, blocks: u32) -> Attribute {
    Attribute {
        seq: Seq(seq),
        span: 1,
        num: 1,
        index: 0,
        ordinal: 1,
        member: Member(member),
        kind: Kind::Write,
        flags: Flags::BOUNDARY,
        lba: START + lba,
        blocks,
        tag: !seq,
    }
}

pub(crate) fn extending(a: Attribute) -> Attribute {
    Attribute { flags: a.flags.with(Flags::EXTEND), ..a }
}

pub(crate) fn in_place(a: Attribute) -> Attribute {
    Attribute { flags: a.flags.with(Flags::IN_PLACE), ..a }
}

/// All targets of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct World {
    pub(crate) targets: Vec<Target>,
    /// Bytes that a target takes or gives with one command.
    pub(crate) transfer: usize,
}

/// The content that a write leaves in its blocks: its index in the history. Blocks hold no other
/// contents but the earlier one ([`old`]), zeroes and junk.
fn content(at: usize) -> u32 {
    1 + at as u32
}

/// The bytes of a block with this content.
fn block_of(content: u32) -> Vec<u8> {
    content.to_le_bytes().repeat(1024)
}

/// The content of every block before the history.
pub(crate) fn old(member: u8, lba: u64) -> u32 {
    0x1_0000 + u32::from(member) * 0x4000 + lba as u32
}

impl World {
    /// `servers` servers of two drives each, volatile where `volatile` returns true, that hold
    /// `old` in their first 64 blocks.
    pub(crate) fn new(servers: usize, streams: usize, volatile: impl Fn(u8) -> bool) -> Self {
        let target = |server: usize| Target {
            known: true,
            generation: 3,
            partitions: vec![Partition::default(); streams],
            drives: (2 * server as u8..2 * server as u8 + 2)
                .map(|member| {
                    let medium = (0..64).map(|lba| (START + lba, old(member, lba))).collect();
                    let volatile = volatile(member);
                    (nsid_of(member), Drive { volatile, medium, cache: BTreeMap::new() })
                })
                .collect(),
            ..Target::default()
        };
        Self { targets: (0..servers).map(target).collect(), transfer: 128 << 10 }
    }

    /// Plays a history: durable blocks have reached the medium, the others may be anywhere.
    pub(crate) fn play(&mut self, history: &[Past], random: &mut Random) {
        for (at, Past { stream, attribute, durable }) in history.iter().enumerate() {
            let member = attribute.member.0;
            let target = &mut self.targets[server_of(member)];
            let partition = &mut target.partitions[usize::from(*stream)];
            partition.entries.push(ListedEntry {
                position: Position(at as u64),
                attribute: *attribute,
                incarnation: 1,
                persisted: *durable,
                durable: *durable,
            });
            let drive = target.drives.get_mut(&nsid_of(member)).unwrap();
            for lba in attribute.lba..attribute.lba + u64::from(attribute.blocks) {
                match random.below(3) {
                    _ if *durable => {
                        drive.medium.insert(lba, content(at));
                        drive.cache.remove(&lba);
                    }
                    0 => {}
                    _ => drive.write(lba, content(at)),
                }
            }
        }
    }

    pub(crate) fn drive(&self, member: u8) -> &Drive {
        &self.targets[server_of(member)].drives[&nsid_of(member)]
    }

    pub(crate) fn config(&self) -> OpeningConfig {
        let server = |(at, target): (usize, &Target)| OpeningServer {
            present: true,
            has_extension: true,
            logged: true,
            loses_log: false,
            has_log: true,
            transfer_bytes_max: self.transfer,
            members: (2 * at as u8..2 * at as u8 + 2)
                .map(|member| OpeningMember {
                    place: MemberNamespace { member: Member(member), nsid: nsid_of(member) },
                    start: START,
                    blocks: BLOCKS,
                    prepare_blocks: PREPARE,
                    volatile: target.drives[&nsid_of(member)].volatile,
                })
                .collect(),
        };
        OpeningConfig {
            volume: VOLUME,
            servers: self.targets.iter().enumerate().map(server).collect(),
        }
    }

    pub(crate) fn intent(&self) -> Intent {
        Intent {
            engine: EngineKind::Rio,
            take_over: false,
            accept_lost_log: false,
            label_generation: 2,
            lease_ms: 45_000,
            streams: self.targets[0].partitions.len() as u16,
        }
    }

    /// Every initiator is dead.
    pub(crate) fn initiators_die(&mut self) {
        for target in &mut self.targets {
            if let Some((_, lives)) = &mut target.owner {
                *lives = false;
            }
        }
    }

    /// The power of a target fails, and comes back.
    pub(crate) fn power_cut(&mut self, server: usize, random: &mut Random) {
        for drive in self.targets[server].drives.values_mut() {
            drive.power_cut(random);
        }
        self.targets[server].owner = None;
    }

    /// Carries out one command of initiator `initiator`.
    pub(crate) fn handle(
        &mut self,
        initiator: u32,
        server: usize,
        call: &Call,
    ) -> Result<Vec<u8>, Status> {
        self.targets[server].handle(initiator, call)
    }
}

/// An initiator that drives an opening, carrying commands out in an order that the seed decides.
pub(crate) struct Driver {
    pub(crate) initiator: u32,
    pub(crate) opening: Opening,
    pub(crate) random: Random,
    sent: Vec<(usize, Ticket, Call)>,
    /// Commands carried out so far.
    pub(crate) calls: usize,
    /// Everything that was carried out, in order.
    pub(crate) log: Vec<(usize, Call)>,
    /// The most commands that a server had in flight at a time.
    pub(crate) most_out: usize,
}

impl Driver {
    pub(crate) fn new(world: &World, initiator: u32, mode: Mode) -> Self {
        Self::with(world.config(), initiator, mode).unwrap()
    }

    pub(crate) fn with(
        config: OpeningConfig,
        initiator: u32,
        mode: Mode,
    ) -> Result<Self, OpeningError> {
        Self::with_attempt(config, initiator, mode, 0)
    }

    pub(crate) fn with_attempt(
        config: OpeningConfig,
        initiator: u32,
        mode: Mode,
        attempt: u32,
    ) -> Result<Self, OpeningError> {
        Ok(Self {
            initiator,
            opening: Opening::new(config, mode, attempt)?,
            random: Random(u64::from(initiator) * 77),
            sent: Vec::new(),
            calls: 0,
            log: Vec::new(),
            most_out: 0,
        })
    }

    fn send(&mut self) {
        for server in 0..64 {
            while let Some((ticket, call)) = self.opening.next_command(server) {
                self.sent.push((server, ticket, call));
            }
            let out = self.sent.iter().filter(|(at, ..)| *at == server).count();
            self.most_out = self.most_out.max(out);
        }
    }

    /// Lets one target carry out one command. `cut`: the initiator dies before it receives the
    /// answer. Returns false when there is nothing more to do.
    pub(crate) fn step(&mut self, world: &mut World, cut: bool) -> Result<bool, OpeningError> {
        self.send();
        if self.sent.is_empty() {
            assert!(self.opening.phase().is_pause() || self.opening.phase() == Phase::Over);
            if self.opening.phase() == Phase::Over {
                return Ok(false);
            }
            self.opening.end_pause()?;
            return Ok(true);
        }
        let at = self.random.below(self.sent.len());
        let (server, ticket, call) = self.sent.swap_remove(at);
        let answer = world.handle(self.initiator, server, &call);
        self.calls += 1;
        self.log.push((server, call));
        if !cut {
            self.opening.on_answer(ticket, answer.as_ref().map(Vec::as_slice).map_err(|s| *s))?;
        }
        Ok(true)
    }

    /// The initiator is gone. Some of its commands in flight are still carried out.
    pub(crate) fn lose(mut self, world: &mut World) {
        for (server, _, call) in core::mem::take(&mut self.sent) {
            if self.random.below(2) == 0 {
                let _ = world.handle(self.initiator, server, &call);
            }
        }
    }

    /// Runs to the end.
    pub(crate) fn run(mut self, world: &mut World) -> Result<Outcome, OpeningError> {
        self.go(world)?;
        Ok(self.opening.into_outcome())
    }

    pub(crate) fn go(&mut self, world: &mut World) -> Result<(), OpeningError> {
        while self.step(world, false)? {
            assert!(self.calls < 10_000, "it has to end");
        }
        Ok(())
    }

    /// Until phase `phase`, of which nothing has been done yet.
    pub(crate) fn go_to(&mut self, world: &mut World, phase: Phase) {
        while self.opening.phase() != phase {
            assert!(self.step(world, false).unwrap(), "{phase:?} is never reached");
        }
    }

    /// Opcodes of the commands carried out, per server.
    pub(crate) fn opcodes(&self, server: usize) -> Vec<u8> {
        let here = self.log.iter().filter(|(at, _)| *at == server);
        here.map(|(_, call)| sqe_of(call).opcode()).collect()
    }
}

pub(crate) fn sqe_of(call: &Call) -> &Sqe {
    match call {
        Call::Admin { sqe, .. } | Call::Io { sqe, .. } => sqe,
    }
}

/// Opens the volume as initiator `initiator`.
pub(crate) fn open(world: &mut World, initiator: u32) -> Result<Outcome, OpeningError> {
    let mode = Mode::Open(world.intent());
    Driver::new(world, initiator, mode).run(world)
}

pub(crate) fn streams(numbers: &[u16]) -> Vec<StreamId> {
    numbers.iter().copied().map(StreamId).collect()
}
