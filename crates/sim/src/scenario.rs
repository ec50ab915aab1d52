//! A scenario: everything that a run is made of. A seed draws one ([`crate::draw`]); it can also be
//! written down and read back, so that a failure stays what it was when the drawing changes.

use riopipe_order::engine::EngineKind;
use serde::{Deserialize, Serialize};

use crate::drive::{DriveFault, DriveSpec};
use crate::log_store::LogStoreKind;
use crate::network::NetSpec;

/// A machine with drives and a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSpec {
    /// Where the log rests.
    pub log: LogStoreKind,
    /// Its drives, all members of the volume.
    pub drives: Vec<DriveSpec>,
    /// Blocks of each drive.
    pub blocks: u32,
    /// The target's reactors. With several, each hears in its own time of what drives have finished
    /// and of what connections leave for one another.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub cores: u8,
    /// Its target is started without a log. Only a volume that needs none can be there.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub logless: bool,
    /// Its target is of another make, and does not speak Rio's extension. The volume was made for
    /// engine `rio`, and falls back to `sync`.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub foreign: bool,
}

/// How the volume's streams keep order. Without an ordering log each keeps a promise of its own
/// (`docs/ordering-contract.md`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// By the targets' ordering logs.
    #[default]
    Rio,
    /// By waiting for the transfer and the FLUSH of a group before the next.
    Sync,
    /// Not at all.
    None,
}

impl Engine {
    /// The engine that is run.
    #[must_use]
    pub const fn kind(self) -> EngineKind {
        match self {
            Self::Rio => EngineKind::Rio,
            Self::Sync => EngineKind::Sync,
            Self::None => EngineKind::None,
        }
    }

    /// Whether the targets keep a log of the volume.
    #[must_use]
    pub const fn is_logged(self) -> bool {
        self.kind().capabilities().keeps_log
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde takes")]
const fn is_rio(engine: &Engine) -> bool {
    engine.is_logged()
}

const fn one() -> u8 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde takes")]
const fn is_one(cores: &u8) -> bool {
    *cores == 1
}

/// The volume and how it is used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSpec {
    /// Streams.
    pub streams: u16,
    /// Slots of each stream's log on each machine.
    pub slots: u32,
    /// Blocks of a stripe unit.
    pub unit: u32,
    /// First block of the data area on each drive.
    pub first: u32,
    /// Blocks of one request at most.
    pub request_blocks: u32,
    /// Members in this order: machine and drive.
    pub members: Vec<(usize, usize)>,
    /// The group from which every stream begins to count.
    pub start: u64,
    /// How its streams keep order.
    #[serde(default, skip_serializing_if = "is_rio")]
    pub engine: Engine,
}

/// How an initiator uses its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientSpec {
    /// Requests in flight per target and stream.
    pub depth: usize,
    /// Blocks held for replay by one stream at most.
    pub kept_blocks: u32,
    /// Whether requests are merged.
    pub merge: bool,
    /// How long a lost target is waited for, ms.
    pub loss_ms: u32,
    /// Keep alive timeout, ms; 0 for none.
    pub keep_alive_ms: u32,
    /// Whether PDUs carry digests.
    pub digests: bool,
    /// How long until a lost connection is made again, µs at most.
    pub retry_us: u32,
    /// How long between two operations of a stream, ns at most.
    pub think_ns: u32,
    /// How long a target may owe an answer before the recovery of a stream is begun anew, over the
    /// same connections, µs; 0: as long as the connections last.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub patience_us: u32,
    /// An owner that has not called for so long has left its stream to the background driver, µs.
    #[serde(default = "away_us")]
    pub away_us: u32,
    /// An idle stream that was left is made durable after so long, µs.
    #[serde(default = "flush_us")]
    pub flush_us: u32,
}

const fn away_us() -> u32 {
    50_000
}

const fn flush_us() -> u32 {
    1_000_000
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What a write of a group is meant to be. What it may be is decided when it is submitted: blocks
/// that another stream holds are left out, own blocks that are not released are written in place or
/// extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// New blocks.
    Fresh,
    /// Over live data.
    InPlace,
    /// Over what is there, for which it serves as well.
    Extend,
    /// Zeroes.
    Discard,
}

/// A write of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteOp(
    /// First block on the volume.
    pub u32,
    /// Blocks.
    pub u32,
    /// What kind.
    pub Place,
);

/// What a stream does next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Submits a group.
    Group {
        /// Its writes.
        writes: Vec<WriteOp>,
        /// Whether it ends with a joint FLUSH.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        durable: bool,
    },
    /// Waits until everything submitted is durable.
    WaitDurable,
    /// Waits until everything submitted is complete.
    WaitComplete,
    /// Reads so many blocks from a block on; or has another thread of its process read them, beside
    /// the streams.
    Read(u32, u32),
    /// Has another thread of its process read them.
    Look(u32, u32),
    /// Does nothing for so many µs.
    Pause(u32),
    /// Leaves the stream as it is, and opens it anew.
    Restart,
    /// Appends records to the log that the stream keeps: the bytes of each, and how many.
    Append(u32, u32),
    /// Appends a checkpoint with so many bytes.
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
    /// Which stream does it.
    pub stream: u16,
    /// What.
    pub op: Op,
}

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    /// After so many events of the run.
    Event(u32),
    /// After so many events of the `n`th recovery, counted from 0.
    Recovery(u32, u32),
    /// After so many events of the `n`th replay, counted from 0.
    Replay(u32, u32),
    /// So many events after the `n`th time that a target was asked to zero something, counted
    /// from 0.
    Undo(u32, u32),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// A target's process is killed, `effects` effects later; it is started again after a while.
    Kill {
        /// Which machine.
        machine: usize,
        /// Effects that still take place; 0: it dies between two events.
        effects: u32,
        /// Only fences of its log count, and it dies in one.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        fences: bool,
        /// How long it is down, µs.
        down_us: u32,
    },
    /// A machine's power is cut, `effects` effects later.
    PowerCut {
        /// Which machine.
        machine: usize,
        /// Effects that still take place; 0: between two events.
        effects: u32,
        /// Only fences of the log count, and it happens in one.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        fences: bool,
        /// How long it is down, µs.
        down_us: u32,
    },
    /// A target is stopped in good order, and started again after a while.
    Stop {
        /// Which machine.
        machine: usize,
        /// Whether the machine is switched off as well.
        off: bool,
        /// In which of the last steps the power is cut: writing the log back, and stamping it.
        /// 0: in none.
        #[serde(default)]
        cut: u32,
        /// How long it is down, µs.
        down_us: u32,
    },
    /// An operator copies a machine's log.
    CopyLog {
        /// Which machine.
        machine: usize,
    },
    /// The target's process is killed, and the copy of its log is put in the log's place, unless
    /// no owner has come since; the right one is put back after the volume has been refused.
    OldLog {
        /// Which machine.
        machine: usize,
    },
    /// The power of all machines is cut, and the initiator's, too.
    BlackOut {
        /// How long the machines are down, µs.
        down_us: u32,
    },
    /// Every process is killed; the machines keep their power.
    KillAll {
        /// How long they are down, µs.
        down_us: u32,
    },
    /// The initiator's process is killed; it is started again after a while.
    KillClient {
        /// How long it is down, µs.
        down_us: u32,
    },
    /// A connection breaks: the `nth` that is there, of all.
    Cut {
        /// Which.
        nth: u32,
        /// For whom.
        ends: Ends,
    },
    /// The connections break over which targets are asked to zero what is undone.
    CutUndo,
    /// A connection carries nothing for a while.
    Stall {
        /// Which.
        nth: u32,
        /// Toward the target, or else the initiator.
        up: bool,
        /// For how long, µs.
        for_us: u32,
    },
    /// What a machine answers on the admin connections that are there comes late for a while.
    Lag {
        /// Which machine.
        machine: usize,
        /// How late, µs.
        by_us: u32,
        /// For how long, µs.
        for_us: u32,
    },
    /// What initiators send, for a while, on connections that their streams begin comes late.
    LateStreams {
        /// How late, µs.
        by_us: u32,
        /// For how long, µs.
        for_us: u32,
    },
    /// The initiator is cut off from all machines for a while; another one takes the volume over.
    TakeOver {
        /// How long the first is cut off, µs.
        for_us: u32,
    },
    /// Another initiator waits for the volume: it asks for it again and again, and may not take it
    /// over while somebody has it.
    Standby,
    /// All connections of the owner break, and it reaches no machine for a while.
    Away {
        /// For how long, µs.
        for_us: u32,
    },
    /// The initiator is cut off from one machine for a while.
    Partition {
        /// Which machine.
        machine: usize,
        /// For how long, µs.
        for_us: u32,
    },
    /// A drive fails.
    Drive {
        /// Which machine.
        machine: usize,
        /// Which of its drives.
        drive: usize,
        /// How.
        fault: DriveFault,
    },
    /// A log store fails after so many fences.
    Log {
        /// Which machine.
        machine: usize,
        /// Fences that succeed.
        fences: u32,
    },
    /// The target's process is killed and comes back with an empty log; the right one is put back
    /// after the volume has been refused.
    BlankLog {
        /// Which machine.
        machine: usize,
    },
    /// The target's process is killed and comes back with a log that somebody has spoilt; the right
    /// one is put back after it has been refused.
    SpoilLog {
        /// Which machine.
        machine: usize,
        /// How.
        how: Spoil,
        /// Which bit of what `how` says.
        bit: u32,
    },
    /// The machine loses its power, and an operator puts another drive in the place of one of its;
    /// the right one is put back after the volume has been refused.
    WrongDrive {
        /// Which machine.
        machine: usize,
        /// Which of its drives.
        drive: usize,
        /// What the label on the other drive says.
        whose: Whose,
    },
    /// A host claims volumes that need no log, each time another one, and gives them back.
    Claimant {
        /// Which machine.
        machine: usize,
        /// On which of its drives.
        drive: usize,
        /// How many.
        volumes: u32,
    },
    /// The target's process is killed and comes back with a drive that has lost its power-loss
    /// protection.
    Unprotect {
        /// Which machine.
        machine: usize,
        /// Which of its drives.
        drive: usize,
        /// How long it is down, µs.
        down_us: u32,
    },
    /// The initiator closes the volume in good order; somebody opens it again after a while.
    GiveBack {
        /// How long nobody has it, us.
        for_us: u32,
    },
    /// A plain host writes a block of a drive, and then reads and writes others.
    Intruder {
        /// Which machine.
        machine: usize,
        /// Which of its drives.
        drive: usize,
        /// Which block.
        lba: u32,
        /// How many operations more.
        #[serde(default)]
        more: u32,
        /// Whether it has the volume's log forgotten first, which it has no right to.
        #[serde(default, skip_serializing_if = "core::ops::Not::not")]
        forgets: bool,
    },
}

impl What {
    /// The machine that it is about, if it is about one.
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
            | Self::SpoilLog { machine, .. }
            | Self::WrongDrive { machine, .. }
            | Self::Claimant { machine, .. }
            | Self::Unprotect { machine, .. }
            | Self::Intruder { machine, .. } => Some(machine),
            Self::BlackOut { .. }
            | Self::KillAll { .. }
            | Self::KillClient { .. }
            | Self::Cut { .. }
            | Self::CutUndo
            | Self::Stall { .. }
            | Self::LateStreams { .. }
            | Self::TakeOver { .. }
            | Self::Standby
            | Self::Away { .. }
            | Self::GiveBack { .. } => None,
        }
    }
}

/// How a log is spoilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Spoil {
    /// A bit of both copies of the region's header is flipped.
    Header,
    /// A bit of both copies of a stream's mark is flipped.
    Marks,
    /// Two streams' partitions have changed places.
    Swapped,
}

/// Whose drive is in the place of a volume's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Whose {
    /// Another volume's of the same name and shape, such as the one that was there before.
    Other,
    /// A later version of Rio has written its label.
    Newer,
}

/// Which ends of a connection learn that it is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Ends {
    /// Both.
    Both,
    /// The initiator's; what it had sent may still arrive.
    Client,
    /// The target's.
    Server,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// When.
    pub when: When,
    /// What.
    pub what: What,
}

/// All of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scenario {
    /// Decides delays and whatever else is left to chance.
    pub seed: u64,
    /// The machines.
    pub machines: Vec<MachineSpec>,
    /// The volume.
    pub volume: VolumeSpec,
    /// How it is used.
    pub client: ClientSpec,
    /// The network.
    pub net: NetSpec,
    /// What the streams do, each in order.
    pub steps: Vec<Step>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// Logs of records that streams of the volume keep. Such a stream does nothing else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logs: Vec<LogSpec>,
    /// A second volume in the same logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neighbour: Option<NeighbourSpec>,
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
    /// Blocks of one group at most.
    pub group_blocks: u32,
    /// Groups that may be incomplete before records wait to be packed together.
    pub groups: u32,
    /// FLUSHes that may be in flight.
    pub flushes: u32,
}

/// A second volume: the machines keep its log beside the first one's. Faults are the first one's;
/// those of machines and logs hit both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeighbourSpec {
    /// The volume, on drives that are not the first one's.
    pub volume: VolumeSpec,
    /// What its streams do.
    pub steps: Vec<Step>,
    /// How often its owner gives it back, or is killed, in between.
    pub lives: u32,
}

impl Scenario {
    /// The scenario as one line of text.
    #[must_use]
    pub fn to_text(&self) -> String {
        // Numbers, strings and lists: nothing here can fail to serialise.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads it back.
    ///
    /// # Errors
    /// What is wrong with the text.
    pub fn from_text(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}
