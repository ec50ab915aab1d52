//! A scenario: everything that a run is made of. A seed draws one ([`crate::draw`]). It can also be
//! written to a file and read back, so that a failure stays the same when the drawing changes.

use riopipe_order::engine::EngineKind;
use serde::{Deserialize, Serialize};

use crate::drive::{DriveFault, DriveSpec};
use crate::log_store::LogStoreKind;
use crate::network::NetSpec;

/// A machine with drives and a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// The kind of its log store.
    pub log: LogStoreKind,
    /// Its drives, all members of the volume.
    pub drives: Vec<DriveSpec>,
    /// Blocks of each drive.
    pub blocks: u32,
    /// The target's reactors. With several, each receives at its own time the results of the drives
    /// and the messages of other reactors.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub cores: u8,
    /// Its target is started without a log. Only a volume that needs no log can be there.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub logless: bool,
    /// Its target is a foreign target. The volume was made for engine `rio`, and falls back to
    /// `sync`.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub foreign: bool,
}

/// The way in which the volume's streams keep order. Without an ordering log each keeps a promise
/// of its own (`docs/ordering-contract.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// With the targets' ordering logs.
    #[default]
    Rio,
    /// With waits for the transfer and the FLUSH of a group before the next group.
    Sync,
    /// With the waits and FLUSHes of a journal on Linux.
    Linux,
    /// With ordering metadata on a control path, in the targets' ordering logs.
    Horae,
    /// With drives that have a cache barrier.
    Barrier,
    /// With drives that keep the order of epochs.
    Opimq,
    /// Without order.
    None,
}

impl Engine {
    /// The engine kind of the library.
    #[must_use]
    pub const fn kind(self) -> EngineKind {
        match self {
            Self::Rio => EngineKind::Rio,
            Self::Sync => EngineKind::Sync,
            Self::Linux => EngineKind::Linux,
            Self::Horae => EngineKind::Horae,
            Self::Barrier => EngineKind::Barrier,
            Self::Opimq => EngineKind::Opimq,
            Self::None => EngineKind::None,
        }
    }

    /// Whether a lost connection costs time only.
    #[must_use]
    pub const fn replays(self) -> bool {
        self.kind().capabilities().can_replay
    }

    /// Whether the targets keep a log of the volume.
    #[must_use]
    pub const fn is_logged(self) -> bool {
        self.kind().capabilities().keeps_log
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde takes")]
const fn is_rio(engine: &Engine) -> bool {
    matches!(engine, Engine::Rio)
}

const fn one() -> u8 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde takes")]
const fn is_one(cores: &u8) -> bool {
    *cores == 1
}

/// The volume and its layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSpec {
    /// The number of streams.
    pub streams: u16,
    /// Slots of each stream's log on each machine.
    pub slots: u32,
    /// Blocks of a stripe unit.
    pub unit: u32,
    /// First block of the data area on each drive.
    pub first: u32,
    /// The maximum number of blocks of one request.
    pub request_blocks: u32,
    /// The members, in this order: machine and drive.
    pub members: Vec<(usize, usize)>,
    /// The group at which every stream begins to count.
    pub start: u64,
    /// The engine of its streams.
    #[serde(default, skip_serializing_if = "is_rio")]
    pub engine: Engine,
    /// The streams whose writes have no order. Engine `barrier` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orderless: Vec<u16>,
    /// Blocks of the prepare area on each drive, right before the data area; 0 for none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prepare: u32,
}

/// The options with which an initiator uses its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientSpec {
    /// Requests in flight per target and stream.
    pub depth: usize,
    /// The maximum number of blocks that one stream holds for replay.
    pub kept_blocks: u32,
    /// Whether requests are merged.
    pub merge: bool,
    /// The number of requests in flight from which whole groups are merged.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub merge_from: u32,
    /// The loss timeout, ms.
    pub loss_ms: u32,
    /// Keep Alive Timeout, ms; 0 for none.
    pub keep_alive_ms: u32,
    /// Whether PDUs carry digests.
    pub digests: bool,
    /// The longest time until a lost connection is made again, µs.
    pub retry_us: u32,
    /// The longest time between two operations of a stream, ns.
    pub think_ns: u32,
    /// The time for which a target may owe an answer before the recovery of a stream is begun again
    /// over the same connections, µs. 0, and after the faults: without a limit, as long as the
    /// connections last.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wait_limit_us: u32,
    /// The time without a call of the owner after which the background driver runs the stream, µs.
    #[serde(default = "not_calling_us")]
    pub not_calling_us: u32,
    /// The time after which the background driver makes an idle stream durable, µs.
    #[serde(default = "flush_us")]
    pub flush_us: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde takes")]
const fn is_none(number: &u8) -> bool {
    *number == 0
}

const fn not_calling_us() -> u32 {
    50_000
}

const fn flush_us() -> u32 {
    1_000_000
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The intended kind of a write. The actual kind is decided when the write is submitted: blocks
/// that another stream holds are left out, and own blocks that are not released are written in
/// place or extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// New blocks.
    Fresh,
    /// In place: over live data.
    InPlace,
    /// An extension: the new content also serves for the old.
    Extend,
    /// Zeroes (a discard).
    Discard,
}

/// A write of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOp(
    /// The first block on the volume.
    pub u32,
    /// The number of blocks.
    pub u32,
    /// The intended kind.
    pub Place,
);

/// One operation of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Submits a group.
    Group {
        /// The writes of the group.
        writes: Vec<WriteOp>,
        /// Whether it ends with a joint FLUSH.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        durable: bool,
    },
    /// Submits a group that another stream follows.
    Followed {
        /// The writes of the group.
        writes: Vec<WriteOp>,
        /// Whether it ends with a joint FLUSH.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        durable: bool,
        /// The other stream.
        follower: u16,
    },
    /// Waits until everything submitted is durable.
    WaitDurable,
    /// Waits until everything submitted is complete.
    WaitComplete,
    /// Reads blocks: the first, and their number. Another thread of the process may read them
    /// instead, beside the streams.
    Read(u32, u32),
    /// Reads blocks in another thread of the process: the first, and their number.
    ReadApart(u32, u32),
    /// Pauses for this time, µs.
    Pause(u32),
    /// Leaves the stream as it is, and opens it again.
    Restart,
    /// Appends records to the stream's log of records: the bytes of each, and their number.
    Append(u32, u32),
    /// Appends a checkpoint with this number of bytes.
    Checkpoint(u32),
    /// Drops records of the log: all up to the last checkpoint that is durable (0), all that are
    /// durable (1), or up to one of them.
    Trim(u32),
    /// Reads the records of the log.
    ReadBack,
}

/// A step of the workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// The stream.
    pub stream: u16,
    /// The operation.
    pub op: Op,
}

/// The moment at which a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    /// After this number of events of the run.
    Event(u32),
    /// After a number of events of the `n`th recovery, counted from 0.
    Recovery(u32, u32),
    /// After a number of events of the `n`th replay, counted from 0.
    Replay(u32, u32),
    /// A number of events after the `n`th request to a target to zero blocks, counted from 0.
    Undo(u32, u32),
    /// A number of events after the `n`th call of the program on a file system, counted from 0.
    Call(u32, u32),
    /// A number of events after the `n`th group of a kind that a file system submits, counted from
    /// 0.
    Group(GroupKind, u32, u32),
}

/// The purpose of a group of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupKind {
    /// Data of files.
    Data,
    /// A file-level record.
    Record,
    /// Blocks of the main journal.
    Journal,
    /// The commit block of a main commit.
    Commit,
    /// Blocks that are written home, and superblocks.
    Home,
}

/// The kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// A target's process is killed, `effects` effects later. It is started again after a while.
    Kill {
        /// The machine.
        machine: usize,
        /// The number of effects that still take place. 0: the process dies between two events.
        effects: u32,
        /// Only fences of its log count, and it dies in a fence.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        fences: bool,
        /// The time until it is started again, µs.
        down_us: u32,
    },
    /// A machine's power is cut, `effects` effects later.
    PowerCut {
        /// The machine.
        machine: usize,
        /// The number of effects that still take place. 0: the cut is between two events.
        effects: u32,
        /// Only fences of the log count, and the cut is in a fence.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        fences: bool,
        /// The time for which the machine is down, µs.
        down_us: u32,
    },
    /// A target stops (clean stop), and is started again after a while.
    Stop {
        /// The machine.
        machine: usize,
        /// Whether the machine is switched off as well.
        off: bool,
        /// The step of the stop in which the power is cut, from 1. The last steps write the log
        /// back and stamp it. 0: the power is not cut.
        #[serde(default)]
        cut: u32,
        /// The time until it is started again, µs.
        down_us: u32,
    },
    /// An operator copies a machine's log.
    CopyLog {
        /// The machine.
        machine: usize,
    },
    /// The target's process is killed, and the copy of its log is put in the log's place, if the
    /// volume has had a new owner since the copy. The right log is put back after the volume has
    /// been refused.
    OldLog {
        /// The machine.
        machine: usize,
    },
    /// The power of all machines and of the initiator is cut.
    BlackOut {
        /// The time for which the machines are down, µs.
        down_us: u32,
    },
    /// Every process is killed; the machines keep their power.
    KillAll {
        /// The time for which the processes are down, µs.
        down_us: u32,
    },
    /// The initiator's process is killed; it is started again after a while.
    KillClient {
        /// The time for which the process is down, µs.
        down_us: u32,
    },
    /// A connection breaks: the `nth` of the open ones.
    Cut {
        /// The number of the connection.
        nth: u32,
        /// The ends that learn of it.
        ends: Ends,
    },
    /// The connections break that carry the undo requests to the targets.
    CutUndo,
    /// A connection carries nothing for a while.
    Stall {
        /// The number of the connection.
        nth: u32,
        /// Toward the target; otherwise toward the initiator.
        up: bool,
        /// The duration, µs.
        for_us: u32,
    },
    /// The answers of a machine on its open admin connections are late for a while.
    Lag {
        /// The machine.
        machine: usize,
        /// The delay, µs.
        by_us: u32,
        /// The duration, µs.
        for_us: u32,
    },
    /// For a while, the data that initiators send on connections of new streams is late.
    LateStreams {
        /// The delay, µs.
        by_us: u32,
        /// The duration, µs.
        for_us: u32,
    },
    /// The initiator is cut off from all machines for a while. Another one takes the volume over.
    TakeOver {
        /// The time for which the first is cut off, µs.
        for_us: u32,
    },
    /// Another initiator waits for the volume. It asks for the volume again and again, and may not
    /// take it over.
    Standby,
    /// All connections of the owner break, and it reaches no machine for a while.
    Unreachable {
        /// The duration, µs.
        for_us: u32,
    },
    /// The initiator is cut off from one machine for a while.
    Partition {
        /// The machine.
        machine: usize,
        /// The duration, µs.
        for_us: u32,
    },
    /// A drive fails.
    Drive {
        /// The machine.
        machine: usize,
        /// The drive of the machine.
        drive: usize,
        /// The fault.
        fault: DriveFault,
    },
    /// A log store fails after a number of fences.
    Log {
        /// The machine.
        machine: usize,
        /// The number of fences that succeed.
        fences: u32,
    },
    /// The target's process is killed and comes back with an empty log. The right log is put back
    /// after the volume has been refused.
    BlankLog {
        /// The machine.
        machine: usize,
    },
    /// The target's process is killed and comes back with a corrupt log. The right log is put back
    /// after the corrupt one has been refused.
    CorruptLog {
        /// The machine.
        machine: usize,
        /// The kind of the corruption.
        how: Corruption,
        /// The bit that is flipped in the data that `how` names.
        bit: u32,
    },
    /// The machine loses its power, and an operator replaces one of its drives by another. The
    /// right drive is put back after the volume has been refused.
    WrongDrive {
        /// The machine.
        machine: usize,
        /// The drive of the machine.
        drive: usize,
        /// The label on the other drive.
        whose: WrongLabel,
    },
    /// A host claims volumes that need no log, one after the other, and releases each.
    Claimant {
        /// The machine.
        machine: usize,
        /// The drive of the machine.
        drive: usize,
        /// The number of volumes.
        volumes: u32,
    },
    /// The target's process is killed and comes back with a drive that has lost its power-loss
    /// protection.
    Unprotect {
        /// The machine.
        machine: usize,
        /// The drive of the machine.
        drive: usize,
        /// The time until it is started again, µs.
        down_us: u32,
    },
    /// The initiator closes the volume and stops cleanly. An initiator opens the volume again after
    /// a while.
    Release {
        /// The time for which the volume is free, µs.
        for_us: u32,
    },
    /// A plain host writes a block of a drive, and then reads and writes others.
    PlainHost {
        /// The machine.
        machine: usize,
        /// The drive of the machine.
        drive: usize,
        /// The block of the drive.
        lba: u32,
        /// The number of further operations.
        #[serde(default)]
        more: u32,
        /// Whether it first asks the target to forget the volume's log. It has no right to that.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        forgets: bool,
    },
}

impl What {
    /// The machine of the fault, if it has one.
    pub fn machine(&mut self) -> Option<&mut usize> {
        match self {
            Self::Kill { machine, .. }
            | Self::PowerCut { machine, .. }
            | Self::Stop { machine, .. }
            | Self::CopyLog { machine }
            | Self::OldLog { machine }
            | Self::Lag { machine, .. }
            | Self::Partition { machine, .. }
            | Self::Drive { machine, .. }
            | Self::Log { machine, .. }
            | Self::BlankLog { machine }
            | Self::CorruptLog { machine, .. }
            | Self::WrongDrive { machine, .. }
            | Self::Claimant { machine, .. }
            | Self::Unprotect { machine, .. }
            | Self::PlainHost { machine, .. } => Some(machine),
            Self::BlackOut { .. }
            | Self::KillAll { .. }
            | Self::KillClient { .. }
            | Self::Cut { .. }
            | Self::CutUndo
            | Self::Stall { .. }
            | Self::LateStreams { .. }
            | Self::TakeOver { .. }
            | Self::Standby
            | Self::Unreachable { .. }
            | Self::Release { .. } => None,
        }
    }
}

/// The kind of corruption of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Corruption {
    /// A bit of both copies of the region's header is flipped.
    Header,
    /// A bit of both copies of a stream's mark is flipped.
    Marks,
    /// Two streams' partitions have changed places.
    Swapped,
}

/// The label of a drive that replaces one of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WrongLabel {
    /// A label of another volume with the same name and shape, such as the volume that was there
    /// before.
    Other,
    /// A label that a later version of Rio has written.
    Newer,
}

/// The ends of a connection that learn that it is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ends {
    /// Both.
    Both,
    /// The initiator's end. The bytes that it had sent may still arrive.
    Client,
    /// The target's end.
    Server,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The moment.
    pub when: When,
    /// The kind.
    pub what: What,
}

/// Everything that a run is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// The seed for delays and all other random decisions.
    pub seed: u64,
    /// The machines.
    pub machines: Vec<MachineSpec>,
    /// The volume.
    pub volume: VolumeSpec,
    /// The options of the initiators.
    pub client: ClientSpec,
    /// The network.
    pub net: NetSpec,
    /// The operations of the streams; each stream's are in order.
    pub steps: Vec<Step>,
    /// The faults.
    pub faults: Vec<Fault>,
    /// Logs of records that streams of the volume keep. Such a stream has no other use.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logs: Vec<LogSpec>,
    /// A second volume in the same logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_volume: Option<SecondVolumeSpec>,
    /// A file system on the volume. The streams have no other use, and no steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fs: Option<FsSpec>,
    /// A plain device on the volume. The streams have no other use, and no steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceSpec>,
}

/// A plain block device on the volume, and a random host that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSpec {
    /// The seed of the host.
    pub seed: u64,
    /// The number of requests of the host.
    pub requests: u32,
    /// The number of requests that may be in flight.
    pub depth: u8,
    /// The longest request in blocks. Some requests for zeroes are for the whole device.
    pub longest: u8,
    /// The blocks of a range, which belongs to one stream.
    pub range_blocks: u8,
    /// The most blocks of a group.
    pub part_blocks: u8,
    /// Of 100 requests, the number that are flushes.
    pub flushes: u8,
    /// Of 100 requests, the number that are reads.
    pub reads: u8,
    /// Of 100 requests, the number that are for zeroes.
    pub zeroes: u8,
    /// Of 100 writes and requests for zeroes, the number that have FUA.
    pub fua: u8,
    /// Of 100 requests, the number for the same few blocks.
    pub hot: u8,
    /// Of 100 requests, the number after which the host pauses.
    pub pauses: u8,
    /// Of 100 requests, the number after which the volume is detached, and attached again.
    #[serde(default, skip_serializing_if = "is_none")]
    pub detaches: u8,
    /// Of 100 times that a thread of the device could run, the number in which it waits for a while.
    #[serde(default, skip_serializing_if = "is_none")]
    pub delays: u8,
}

/// RioFS on the volume, and a random program that uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsSpec {
    /// The seed of the program.
    pub seed: u64,
    /// The number of calls of the program.
    pub calls: u32,
    /// Whether each `fsync` is a main commit, as on ext4.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub like_ext4: bool,
    /// Of 100 calls, the number after which the program pauses.
    pub pauses: u8,
    /// Of 100 calls, the number after which the file system is unmounted, and mounted again.
    pub remounts: u8,
    /// Of 100 calls, the number that begin a sequence of a database: write, barrier, write, sync.
    #[serde(default, skip_serializing_if = "is_none")]
    pub ordered: u8,
    /// Of 100 calls, the number that begin a sequence by which blocks pass to another file.
    #[serde(default, skip_serializing_if = "is_none")]
    pub reuse: u8,
    /// The blocks that the program can use; a file has the others. 0: all.
    #[serde(default, skip_serializing_if = "is_none")]
    pub space: u8,
    /// Of 100 requests of the file system, the number before which other events happen.
    pub delays: u8,
    /// The blocks of a file-level journal, at most.
    pub area_blocks: u32,
    /// The dirty pages of a file at which a write submits them.
    pub dirty_pages: u32,
}

/// A log of records. Its blocks are its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogSpec {
    /// The stream that keeps it.
    pub stream: u16,
    /// The first block on the volume.
    pub first: u32,
    /// Blocks, at least 17.
    pub blocks: u32,
    /// The maximum number of blocks of one group.
    pub group_blocks: u32,
    /// The number of groups that may be incomplete before records wait to be packed together.
    pub groups: u32,
    /// The number of FLUSHes that may be in flight.
    pub flushes: u32,
}

/// A second volume. The machines keep its log beside the log of the first. The scenario's faults
/// are those of the first volume; faults of machines and logs hit both volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecondVolumeSpec {
    /// The volume, on drives that are not those of the first.
    pub volume: VolumeSpec,
    /// The operations of its streams.
    pub steps: Vec<Step>,
    /// The number of times that its owner releases it, or is killed, before the steps are done.
    pub lives: u32,
}

impl Scenario {
    /// The scenario as one line of text.
    #[must_use]
    pub fn to_text(&self) -> String {
        // The scenario has only numbers, strings and lists, so it can always be serialised.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a scenario from its text.
    ///
    /// # Errors
    /// A description of the error in the text.
    pub fn from_text(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}
