//! Two targets and one stream, moved step by step: the real engine, gates and logs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use riopipe_order::attribute::{Attribute, Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::rio::Rio;
use riopipe_order::engine::{
    Engine, Limits, Marks, Op, OrderedDispatch, Payload, RequestId, Write,
};
use riopipe_order::entry::{Origin, PartitionId, Position};
use riopipe_order::gate::{MemberCache, Step, Ticket};
use riopipe_order::ordering_log::{StreamLog, partition_bytes};
use riopipe_order::recovery::{ListedEntry, StreamList, StreamPlan, decide, validate};
use riopipe_order::topology::{MemberInfo, ServerInfo, Topology};

use crate::media::{Drive, Words};
use crate::table_gate::TableGate;
use crate::workload::{Group, UNIT};

const SLOTS: u32 = 32;
const TICKETS: u32 = 32;
const GENERATION: u32 = 1;
const ID: PartitionId = PartitionId { volume: VolumeId([7; 16]), stream: StreamId(0) };

/// The content of a block: the number of the group's write, never 0.
#[derive(Clone, Debug)]
pub(crate) struct Content(u64);

impl Payload for Content {
    fn part(&self, _: u32, _: u32) -> Self {
        self.clone()
    }
}

/// A step that can happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// The next group is submitted.
    Admit,
    /// A request reaches its target, and its attribute the log.
    Arrive(usize),
    /// The log is fenced, and the steps of the gate go to the drive.
    Submit(usize),
    /// The drive finishes an operation; persist words are stored.
    Finish(usize, usize),
    /// The log is fenced, and complete entries are answered.
    Answer(usize),
}

struct Target {
    gate: TableGate,
    log: StreamLog<Words>,
    drive: Drive,
    incarnation: u32,
    entries: Vec<(RequestId, Attribute, Position, Vec<u64>)>,
    free: Vec<u32>,
    /// The steps of the gate to be done at the drive.
    todo: VecDeque<Step>,
    /// Complete entries, to be answered after the next fence.
    done: Vec<(RequestId, bool)>,
}

/// The whole small world.
pub(crate) struct World {
    topology: Topology,
    engine: Rio<Content>,
    targets: Vec<Target>,
    groups: VecDeque<Group>,
    /// Seq of each group of the workload, and its writes.
    pub(crate) submitted: BTreeMap<Seq, Group>,
    pub(crate) marks: Marks,
    pub(crate) steps: u32,
}

fn caches(volatile: bool) -> [MemberCache; 1] {
    [MemberCache { member: Member(0), volatile }]
}

impl World {
    pub(crate) fn new(volatile: [bool; 2], groups: &[Group], merge: bool) -> Self {
        let members = [0, 1].map(|server| MemberInfo {
            server,
            start: 0,
            blocks: UNIT,
            request_blocks_max: 8,
            volatile: volatile[usize::from(server)],
        });
        let servers = vec![ServerInfo { slots: SLOTS }; 2];
        let topology = Topology::new(members.to_vec(), servers, UNIT as u32).unwrap();
        let limits = Limits { kept_bytes_max: 1 << 20, merge, ..Limits::default() };
        let origin = Origin { generation: GENERATION, incarnation: 1 };
        let target = |volatile| {
            let region = Words::new(partition_bytes(SLOTS));
            let mut log = StreamLog::format(region, ID, GENERATION, crate::crc32c).unwrap();
            log.start(origin, Seq::ZERO).unwrap();
            Target {
                gate: TableGate::new(&caches(volatile), TICKETS),
                log,
                drive: Drive::new(volatile),
                incarnation: 1,
                entries: Vec::new(),
                free: (0..TICKETS).rev().collect(),
                todo: VecDeque::new(),
                done: Vec::new(),
            }
        };
        Self {
            engine: Rio::new(topology.clone(), limits),
            topology,
            targets: volatile.into_iter().map(target).collect(),
            groups: groups.iter().cloned().collect(),
            submitted: BTreeMap::new(),
            marks: Marks::default(),
            steps: 0,
        }
    }

    /// The steps that can happen now. A request can arrive at a target if the engine has one for
    /// it. Only a call of the engine shows this, so an arrival is always offered and may turn out
    /// to be nothing.
    pub(crate) fn actions(&self, waiting: [bool; 2]) -> Vec<Action> {
        let mut actions = Vec::new();
        if !self.groups.is_empty() {
            actions.push(Action::Admit);
        }
        for (t, target) in self.targets.iter().enumerate() {
            if waiting[t] {
                actions.push(Action::Arrive(t));
            }
            if !target.todo.is_empty() {
                actions.push(Action::Submit(t));
            }
            for op in 0..target.drive.in_flight() {
                actions.push(Action::Finish(t, op));
            }
            if !target.done.is_empty() {
                actions.push(Action::Answer(t));
            }
        }
        actions
    }

    /// Does a step. Returns false for an arrival of nothing.
    pub(crate) fn act(&mut self, action: Action) -> bool {
        self.steps += 1;
        match action {
            Action::Admit => {
                let group = self.groups.pop_front().expect("offered only if there is one");
                let writes: Vec<Write<Content>> = group
                    .writes
                    .iter()
                    .map(|w| Write {
                        lba: w.lba,
                        blocks: 1,
                        op: Op::Write(w.place, Content(w.content)),
                    })
                    .collect();
                let seq = self.engine.admit(&mut writes.clone(), group.tag, group.durable).unwrap();
                self.submitted.insert(seq, group);
                true
            }
            Action::Arrive(t) => self.arrive(t),
            Action::Submit(t) => {
                self.targets[t].submit();
                true
            }
            Action::Finish(t, op) => {
                self.targets[t].finish(op);
                true
            }
            Action::Answer(t) => {
                for (id, ok) in self.targets[t].answer() {
                    assert!(ok, "nothing fails here");
                    self.engine.on_request_done(id, Ok(()));
                }
                self.marks = self.engine.poll();
                true
            }
        }
    }

    fn arrive(&mut self, t: usize) -> bool {
        let Some(dispatch) = self.engine.next_request(t as u16) else { return false };
        let OrderedDispatch { ordinal, released } =
            dispatch.ordered.expect("the rio engine orders everything");
        let request = self.engine.request(dispatch.id);
        let attribute = request.attribute(ordinal);
        let contents = request.pieces.iter().map(|content| content.0).collect();
        self.targets[t].arrive(dispatch.id, attribute, contents, released);
        true
    }

    /// No step is left, and all groups are admitted: asks for durability of the rest.
    pub(crate) fn ask_durable(&mut self) -> bool {
        self.marks = self.engine.poll();
        let last = self.engine.last_admitted();
        let asked = self.marks.durable < last;
        self.engine.ask_durable(last);
        self.marks = self.engine.poll();
        asked
    }

    /// Target `t` loses power and comes back; the same owner goes on (P7). `log` selects the
    /// unfenced log writes that are present.
    pub(crate) fn target_crashes(&mut self, t: usize, log: u32) {
        assert!(self.engine.suspend(t as u16));
        let target = &mut self.targets[t];
        target.incarnation += 1;
        let volatile = target.drive.volatile;
        let (mut reopened, _) =
            StreamLog::open(target.log.region().cut(log), ID, crate::crc32c).unwrap();
        reopened
            .resume(Origin { generation: GENERATION, incarnation: target.incarnation })
            .unwrap();
        target.log = reopened;
        target.drive = target.drive.power_cut();
        target.gate = TableGate::new(&caches(volatile), TICKETS);
        target.entries.clear();
        target.free = (0..TICKETS).rev().collect();
        target.todo.clear();
        target.done.clear();
        let list = self.list(t, &self.targets[t].log.region().as_is());
        let durable: BTreeSet<(Seq, u16)> = list
            .entries
            .iter()
            .filter(|entry| entry.durable)
            .map(|entry| (entry.attribute.seq, entry.attribute.index))
            .collect();
        self.engine.resume(t as u16, &mut |seq, index| durable.contains(&(seq, index)));
    }

    /// How many states target `t`'s log may be in after a power cut now.
    pub(crate) fn log_cuts(&self, t: usize) -> u32 {
        self.targets[t].log.region().cuts()
    }

    /// Target `t`'s log after a power cut, or (`None`) as it is.
    pub(crate) fn log(&self, t: usize, cut: Option<u32>) -> Words {
        let region = self.targets[t].log.region();
        cut.map_or_else(|| region.as_is(), |which| region.cut(which))
    }

    pub(crate) fn drive(&self, t: usize) -> &Drive {
        &self.targets[t].drive
    }

    /// The list that target `t` reports of this log.
    pub(crate) fn list(&self, t: usize, region: &Words) -> StreamList {
        let (_, scan) = StreamLog::open(region.clone(), ID, crate::crc32c).unwrap();
        let durable = validate(&scan.entries);
        let entries = scan.entries.iter().zip(durable).map(|(entry, durable)| ListedEntry {
            position: entry.position,
            attribute: entry.attribute,
            incarnation: entry.origin.incarnation,
            persisted: entry.persisted,
            durable,
        });
        StreamList {
            in_doubt: false,
            server: t as u16,
            released: scan.released,
            newest_tag: scan.newest_tag,
            settled: scan.settled,
            entries: entries.collect(),
        }
    }

    /// The plan of recovery for these logs.
    pub(crate) fn plan(&self, logs: &[Words; 2]) -> StreamPlan {
        let lists = [0, 1].map(|t| self.list(t, &logs[t]));
        let server = |member: Member| Some(self.topology.member(member).server);
        decide(ID.stream, &lists, server).unwrap()
    }

    /// The log after recovery has settled it.
    pub(crate) fn settled(log: &Words, k: Seq, tag: u64, keep: bool) -> Words {
        let (mut log, _) = StreamLog::open(log.clone(), ID, crate::crc32c).unwrap();
        log.settle(k, tag).unwrap();
        if !keep {
            log.remove_entries().unwrap();
        }
        log.region().as_is()
    }
}

impl Target {
    fn arrive(&mut self, id: RequestId, attribute: Attribute, contents: Vec<u64>, released: Seq) {
        self.log.release(released);
        let ticket = self.free.pop().expect("more tickets than requests");
        if self.entries.len() <= ticket as usize {
            let blank = (id, attribute, Position(0), Vec::new());
            self.entries.resize(ticket as usize + 1, blank);
        }
        self.entries[ticket as usize] = (id, attribute, Position(0), contents);
        let mut steps = Vec::new();
        let at_gate = Attribute { member: Member(0), ..attribute };
        self.gate.arrive(Ticket(ticket), &at_gate, &mut steps).unwrap();
        self.take(steps);
    }

    fn take(&mut self, steps: Vec<Step>) {
        for step in steps {
            match step {
                Step::Append(Ticket(ticket)) => {
                    let entry = &mut self.entries[ticket as usize];
                    entry.2 = self.log.append(&entry.1).unwrap();
                }
                Step::Complete { ticket: Ticket(ticket), persist } => {
                    let (id, _, position, _) = self.entries[ticket as usize].clone();
                    if persist {
                        self.log.persist(position);
                    }
                    self.free.push(ticket);
                    self.done.push((id, true));
                }
                Step::Refuse { ticket: Ticket(ticket), .. } => {
                    self.done.push((self.entries[ticket as usize].0, false));
                }
                Step::Write(_) | Step::Flush(_) => self.todo.push_back(step),
            }
        }
    }

    fn submit(&mut self) {
        self.log.fence().unwrap();
        for step in std::mem::take(&mut self.todo) {
            match step {
                Step::Write(Ticket(ticket)) => {
                    let (_, attribute, _, contents) = &self.entries[ticket as usize];
                    let blocks = attribute.lba..attribute.lba + u64::from(attribute.blocks);
                    let writes = blocks.zip(contents.iter().copied()).collect();
                    self.drive.write(ticket, writes);
                }
                Step::Flush(Ticket(ticket)) => self.drive.flush(ticket),
                _ => unreachable!("only these are kept to do"),
            }
        }
    }

    fn finish(&mut self, op: usize) {
        let (ticket, flush) = self.drive.finish(op);
        let mut steps = Vec::new();
        if flush {
            self.gate.flushed(Ticket(ticket), true, &mut steps);
        } else {
            self.gate.written(Ticket(ticket), true, &mut steps);
        }
        self.take(steps);
    }

    fn answer(&mut self) -> Vec<(RequestId, bool)> {
        self.log.fence().unwrap();
        std::mem::take(&mut self.done)
    }
}

/// Whether the blocks of an entry beyond k may keep the content that it wrote.
pub(crate) fn is_listed(plan: &StreamPlan, member: u8, lba: u64) -> bool {
    plan.in_place.iter().any(|p| {
        p.extent.member == Member(member)
            && (p.extent.lba..p.extent.lba + p.extent.blocks).contains(&lba)
    })
}

/// Whether recovery zeroes a block.
pub(crate) fn is_undone(plan: &StreamPlan, member: u8, lba: u64) -> bool {
    plan.undo.iter().any(|e| e.member == Member(member) && (e.lba..e.lba + e.blocks).contains(&lba))
}
