//! A machine with drives, a log store and a target's process.

use riopipe_order::attribute::{Member, Seq, StreamId, VolumeId};
use riopipe_order::engine::EngineKind;
use riopipe_order::entry::{Origin, PartitionId};
use riopipe_order::log_region::opening::Place;
use riopipe_order::log_region::{
    Class, HEADER_BYTES, LogRegion, MemberNamespace, NewVolume, PARTITION_ALIGN, VolumeState,
    inspect,
};
use riopipe_order::ordering_log::{StreamLog, partition_bytes};
use riopipe_order::region::RegionError;
use riopipe_session::label::{LABEL_LEN, LABEL_VERSION, Label, MemberId};
use riopipe_session::target::{Identity, NamespaceConfig, Namespaces, Shared, Split, Volumes};

use crate::block::{BLOCK, GARBAGE};
use crate::crash_injector::CrashInjector;
use crate::drive::{Drive, DriveSpec, LABEL_BLOCKS};
use crate::drive_queue::DriveQueue;
use crate::env::{SimEnv, TraceLines};
use crate::log_store::{KeptLog, LogPart, LogStore};
use crate::rng::Rng;
use crate::scenario::{MachineSpec, VolumeSpec, WrongLabel};
use riopipe_platform::crc32c;

mod process;

use process::Process;
pub use process::{Out, Tcp};

/// The place of a label's version in its block, bytes.
const LABEL_VERSION_AT: usize = 8;
/// The maximum number of operations that a drive is given at once: the product's value, unless a
/// test lowers it.
const DEPTH: usize = 512;

/// The first volume of a simulated cluster, and usually the only one.
pub const VOLUME: VolumeId = VolumeId(*b"simulated volume");

/// The name of the first volume.
pub const VOLUME_NAME: &str = "simulated";
/// The generation of the first volume when it has been made.
pub const FIRST_GENERATION: u32 = 1;

/// A machine.
pub struct Machine {
    /// The target environment of its sessions.
    pub env: SimEnv,
    /// Its log store.
    pub store: LogStore,
    /// The cores of its target's process, and what its kernel has for them.
    process: Process,
    /// The effects of the process outside of the machine.
    pub out: Vec<Out>,
    spec: MachineSpec,
    index: usize,
    rng: Rng,
    up: bool,
    powered: bool,
    /// The number of the target's process.
    pub incarnation: u32,
    boot: u64,
    crash_injector: CrashInjector,
    /// For each drive, the time at which it is polled next, ns, if that is planned.
    polls: Vec<Option<u64>>,
    /// The right log, while an empty or an older one is in its place.
    pub right_log: Option<KeptLog>,
    /// The right drive and its number, while another drive is in its place.
    wrong: Option<(usize, DriveQueue)>,
    /// The first part of Rio's extension that was sent to a foreign target.
    pub extension_sent: Option<String>,
    /// Its last process ended with a clean stop, up to the last byte of its log.
    stopped_cleanly: bool,
}

impl Machine {
    /// A machine that is off, with blank drives, and with volumes in its log. Each volume has the
    /// mark from which its streams resume.
    #[must_use]
    pub fn new(
        index: usize,
        spec: &MachineSpec,
        volumes: &[(NewVolume, Seq)],
        mut rng: Rng,
        traced: bool,
    ) -> Self {
        let crash_injector = CrashInjector::default();
        let store = LogStore::new(spec.log, crash_injector.clone(), rng.fork(0));
        let trace_lines = TraceLines::new(traced);
        let drives = spec.drives.iter().enumerate().map(|(at, drive)| {
            new_drive(
                (at, *drive, spec.blocks),
                rng.fork(1 + at as u64),
                &crash_injector,
                &trace_lines,
            )
        });
        let env = SimEnv::new(drives.collect(), crash_injector.clone(), trace_lines);
        let mut machine = Self {
            env,
            store,
            process: Process::default(),
            out: Vec::new(),
            spec: spec.clone(),
            index,
            rng,
            up: false,
            powered: true,
            incarnation: 0,
            boot: 1,
            crash_injector,
            polls: vec![None; spec.drives.len()],
            right_log: None,
            wrong: None,
            extension_sent: None,
            stopped_cleanly: false,
        };
        machine.format(volumes);
        machine.store.persist_all();
        machine
    }

    /// Makes the log region with volumes in it, as `rio volume create` leaves it; without volumes,
    /// if they need no log.
    fn format(&mut self, volumes: &[(NewVolume, Seq)]) {
        let len = log_len(volumes.iter().map(|(volume, _)| volume));
        let boot = self.boot_id();
        let header = self.store.part(0..HEADER_BYTES);
        let uuid = first_region(self.index);
        let kind = self.store.kind().log_kind();
        let mut region = LogRegion::create(header, len, uuid, boot, kind, crc32c)
            .expect("a store that works takes a region");
        if volumes.iter().all(|(volume, _)| volume.streams == 0) {
            return;
        }
        let store = self.store.clone();
        for (volume, start) in volumes {
            let id = volume.id;
            let added = region.add_volume(volume.clone(), |stream, range| {
                let id = PartitionId { volume: id, stream };
                let mut log = StreamLog::format(store.part(range), id, 0, crc32c)
                    .map_err(|e| RegionError::new(e.to_string()))?;
                if *start > Seq::ZERO {
                    // As if this number of groups had been written and released.
                    let origin = Origin { generation: 0, incarnation: 1 };
                    log.start(origin, *start).map_err(|e| RegionError::new(e.to_string()))?;
                }
                Ok(())
            });
            added.expect("the region was made for the volumes");
            region
                .set_generation(id, FIRST_GENERATION, [0; 16], 0)
                .and_then(|()| region.set_state(id, VolumeState::Closed))
                .expect("a store that works takes a claim");
        }
    }

    fn boot_id(&self) -> [u8; 16] {
        let mut id = [self.index as u8 + 1; 16];
        id[..8].copy_from_slice(&self.boot.to_le_bytes());
        id
    }

    /// Whether the target's process runs.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it has power.
    #[must_use]
    pub const fn is_powered(&self) -> bool {
        self.powered
    }

    /// The description of the machine.
    #[must_use]
    pub const fn spec(&self) -> &MachineSpec {
        &self.spec
    }

    /// Whether a drive still works on operations of an earlier process. A target that serves a
    /// drive holds its lock until the last such operation has come back (trap T8).
    #[must_use]
    pub fn has_late_operations(&self) -> bool {
        self.env.drives.iter().any(|drive| drive.has_late_operations())
    }

    /// Starts the target's process. Returns the defect of the log, if there is one. A log of
    /// another boot is made anew if it is `given_up`; otherwise its volumes are refused (trap T19).
    ///
    /// # Errors
    /// The log store failed.
    pub fn start(&mut self, volumes: &[NewVolume], given_up: bool) -> Result<Vec<String>, String> {
        debug_assert!(!self.up);
        self.crash_injector.reset();
        self.incarnation += 1;
        self.stopped_cleanly = false;
        self.powered = true;
        self.store.open().map_err(|error| error.to_string())?;
        if self.spec.logless || self.spec.foreign {
            self.serve(Volumes::without_log(crc32c));
            return Ok(Vec::new());
        }
        let header = self.store.part(0..HEADER_BYTES);
        let store = self.store.clone();
        let split: Split<LogPart> = Box::new(move |range| Ok(store.part(range)));
        let kind = self.store.kind().log_kind();
        let place = Place { len: log_len(volumes), kind, boot: self.boot_id(), is_restored: true };
        let new_uuid = [0xb0 ^ self.incarnation as u8; 16];
        let opened = Volumes::open(header, split, place, given_up, new_uuid, crc32c)
            .map_err(|refused| refused.to_string())?;
        self.serve(opened.volumes);
        Ok(opened.problems)
    }

    fn serve(&mut self, volumes: Volumes<LogPart>) {
        let drives = self.env.drives.iter().zip(1..).map(|(drive, nsid)| NamespaceConfig {
            nsid,
            blocks: u64::from(self.spec.blocks),
            lba_size: Default::default(),
            ana_group: 1,
            nguid: nguid(self.index, nsid as usize - 1),
            uuid: [0x80 + 16 * self.index as u8 + nsid as u8; 16],
            volatile: !drive.spec().plp,
            order: drive.order(),
        });
        let namespaces = Namespaces::new(drives.collect()).expect("ids are counted from 1");
        // The process resets the controllers of its drives. Other epochs than 0 soon wrap.
        let first_epoch =
            if (self.index as u32 + self.incarnation).is_multiple_of(2) { 0 } else { 65_530 };
        for drive in &mut self.env.drives {
            drive.reset_streams(self.env.now, first_epoch);
        }
        let mut shared = Shared::new(identity(self.index), namespaces, volumes, self.env.now);
        shared.set_first_epoch(first_epoch);
        self.env.shared = Some(shared);
        self.up = true;
        self.begin_process();
    }

    /// Flushes the drives, and ends the log's service, at the end of a clean stop.
    ///
    /// # Errors
    /// The log could not be written back.
    pub fn end_service(&mut self) -> Result<(), RegionError> {
        self.env.drives.iter_mut().for_each(|drive| drive.sync());
        let store = self.store.clone();
        if let Some(shared) = &mut self.env.shared {
            shared.end_service(self.env.now, || store.sync())?;
        }
        self.stopped_cleanly = !self.has_stopped();
        Ok(())
    }

    /// Whether its last process ended with a clean stop.
    #[must_use]
    pub const fn has_stopped_cleanly(&self) -> bool {
        self.stopped_cleanly
    }

    /// Each volume's generation in the log that is there, if the log is readable and has all
    /// volumes.
    #[must_use]
    pub fn log_generations(&self, volumes: &[NewVolume]) -> Option<Vec<u32>> {
        let header = self.store.part(0..HEADER_BYTES);
        let Class::Ours(found) = inspect(&header, log_len(volumes), self.boot_id(), crc32c) else {
            return None;
        };
        let record_of =
            |volume: &NewVolume| found.volumes.iter().find(|other| other.id == volume.id);
        volumes.iter().map(|volume| record_of(volume).map(|found| found.generation)).collect()
    }

    /// Whether the right log is in its place, and accepts writes.
    #[must_use]
    pub fn has_its_log(&self) -> bool {
        self.right_log.is_none() && self.store.works()
    }

    /// The recovery that the log would need, were the target started now: the first stream with
    /// entries that wait for recovery, and the number of these entries.
    #[must_use]
    pub fn left_to_recover(&self, volumes: &[NewVolume]) -> Option<(u16, usize)> {
        let header = self.store.part(0..HEADER_BYTES);
        let Class::Ours(found) = inspect(&header, log_len(volumes), self.boot_id(), crc32c) else {
            return None;
        };
        // A log that was made anew may have other partitions.
        let record = found.volumes.iter().find(|volume| volume.id == VOLUME)?;
        (0..record.streams).map(StreamId).find_map(|stream| {
            let part = self.store.part(record.partition(stream)?);
            let id = PartitionId { volume: VOLUME, stream };
            let (_, scan) = StreamLog::open(part, id, crc32c).ok()?;
            (!scan.settled && !scan.entries.is_empty()).then_some((stream.0, scan.entries.len()))
        })
    }

    /// Ends the target's process at its present point.
    pub fn kill(&mut self) {
        self.up = false;
        self.env.shared = None;
        self.process = Process::default();
        self.out.clear();
        self.env.messages.clear();
        for drive in &mut self.env.drives {
            drive.orphan();
        }
        self.store.process_died(&mut self.rng);
        self.crash_injector.reset();
    }

    /// Cuts the power of the machine.
    pub fn power_cut(&mut self) {
        // A write in flight is lost or lands before the process could see either.
        let now = self.env.now;
        self.env.drives.iter_mut().for_each(|drive| drive.power_cut(now));
        self.store.power_cut(&mut self.rng);
        if let Some(log) = &mut self.right_log {
            log.power_cut(self.store.kind(), &mut self.rng);
        }
        self.boot += 1;
        self.powered = false;
        self.kill();
    }

    /// Replaces a drive by another one, while the machine is off. The other drive has the same
    /// size, the same identity, and a label of the kind `whose`. Its blocks have any content.
    pub fn replace_drive(&mut self, drive: usize, whose: WrongLabel) {
        let right_drive = &self.env.drives[drive];
        let copies = right_drive.bytes(&[right_drive.block(0), right_drive.block(1)]);
        let (older, newer) = copies.split_at(LABEL_LEN);
        let (Ok(mut label), None) = (Label::newest([older, newer], crc32c), &self.wrong) else {
            return;
        };
        if whose == WrongLabel::Other {
            label.volume = VolumeId(*b"another volume!!");
        }
        let mut block = label.encode(crc32c);
        if whose == WrongLabel::Newer {
            block[LABEL_VERSION_AT..][..4].copy_from_slice(&(LABEL_VERSION + 1).to_le_bytes());
        }
        let (spec, rng) = (*right_drive.spec(), self.rng.fork(drive as u64));
        let shape = (drive, spec, self.spec.blocks);
        let mut other = new_drive(shape, rng, &self.crash_injector, &self.env.trace_lines);
        (LABEL_BLOCKS..self.spec.blocks).for_each(|lba| other.preset(lba, GARBAGE));
        let name = other.name_label(&block);
        (0..LABEL_BLOCKS).for_each(|lba| other.preset(lba, name));
        let right = core::mem::replace(&mut self.env.drives[drive], other);
        self.wrong = Some((drive, right));
    }

    /// Puts the right drive back. Returns whether another was in its place.
    pub fn put_drive_back(&mut self) -> bool {
        let Some((at, drive)) = self.wrong.take() else { return false };
        self.env.drives[at] = drive;
        true
    }

    /// The drive that has another one in its place.
    #[must_use]
    pub fn replaced_drive(&self) -> Option<usize> {
        self.wrong.as_ref().map(|(at, _)| *at)
    }

    /// A drive of the machine, also while another one is in its place.
    #[must_use]
    pub fn drive(&self, at: usize) -> &Drive {
        match &self.wrong {
            Some((replaced, right)) if *replaced == at => right,
            _ => &self.env.drives[at],
        }
    }

    /// The number of volumes that the target remembers, and the maximum: those in its log, and as
    /// many without a log as it has drives (trap T28).
    #[must_use]
    pub fn remembers(&self, in_log: usize) -> Option<(usize, usize)> {
        let remembered = self.env.shared.as_ref()?.volumes().remembered();
        Some((remembered, in_log + self.env.drives.len()))
    }

    /// Stops the process after this number of further effects on drives, log and network. With
    /// `fences`, stops it in the fence after this number of further fences.
    pub fn stop_after(&self, effects: u32, fences: bool) {
        self.crash_injector.plan_crash(effects, fences);
    }

    /// Whether the process has stopped in the middle of an effect.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.crash_injector.has_stopped()
    }
}

/// A drive of a machine, and the queue to it.
fn new_drive(
    (at, spec, blocks): (usize, DriveSpec, u32),
    mut rng: Rng,
    crash_injector: &CrashInjector,
    trace_lines: &TraceLines,
) -> DriveQueue {
    let name = format!("drive {at}");
    let depth = *rng.pick(&[2, 8, DEPTH, DEPTH]);
    DriveQueue::new(
        Drive::new((spec, blocks), &name, rng, crash_injector.clone(), trace_lines.of(&name)),
        depth,
    )
}

/// Bytes of a log region for one volume, or for several volumes and the same space again. When the
/// log is made anew a second time, the target does not know the volumes that have not come back,
/// and the first one to come may get half of the log.
fn log_len<'a>(volumes: impl IntoIterator<Item = &'a NewVolume>) -> usize {
    let stride = |slots| partition_bytes(slots).next_multiple_of(PARTITION_ALIGN);
    let mut bytes =
        volumes.into_iter().map(|volume| usize::from(volume.streams.max(1)) * stride(volume.slots));
    let first = bytes.next().unwrap_or(0);
    let rest: usize = bytes.sum();
    HEADER_BYTES + if rest == 0 { first } else { 2 * (first + rest) }
}

/// The NGUID of a machine's drive, counted from 0.
#[must_use]
pub const fn nguid(machine: usize, drive: usize) -> [u8; 16] {
    [16 * (machine as u8 + 1) + drive as u8 + 1; 16]
}

/// The log region that a machine has from the start.
const fn first_region(machine: usize) -> [u8; 16] {
    [0x40 + machine as u8; 16]
}

/// Writes the labels of a volume onto its drives, as `rio volume create` leaves them.
pub fn label(machines: &mut [Machine], (id, name): (VolumeId, &str), volume: &VolumeSpec) {
    let members = volume.members.iter().map(|(machine, drive)| MemberId {
        nguid: nguid(*machine, *drive),
        region: if volume.engine.is_logged() { first_region(*machine) } else { [0; 16] },
    });
    let members: Vec<MemberId> = members.collect();
    // As an owner left the label when it gave up the log that one of these targets once had.
    let foreign = volume.members.iter().any(|(machine, _)| machines[*machine].spec.foreign);
    let engine = if foreign { EngineKind::Rio } else { volume.engine.kind() };
    for (index, (machine, drive)) in volume.members.iter().enumerate() {
        let blocks = machines[*machine].spec.blocks;
        let drive = &mut machines[*machine].env.drives[*drive];
        for sequence in [1, 2] {
            let label = Label {
                volume: id,
                name: name.into(),
                block_size: BLOCK as u32,
                unit_blocks: volume.unit,
                data_blocks: u64::from(blocks - volume.first),
                prepare_blocks: volume.prepare,
                streams: volume.streams,
                engine,
                index: index as u16,
                generation: FIRST_GENERATION,
                sequence,
                members: members.clone(),
            };
            let name = drive.name_label(&label.encode(crc32c));
            drive.preset(Label::block_of(sequence) as u32, name);
        }
    }
}

/// The NQN of a machine's subsystem.
#[must_use]
pub fn subnqn(machine: usize) -> String {
    format!("nqn.2026-01.io.example:machine{machine}")
}

fn identity(machine: usize) -> Identity {
    Identity { io_queues: 32, ..Identity::open_to_all(subnqn(machine), format!("SIM{machine}")) }
}

/// A volume's partitions on a machine. Without streams, the volume has no log there.
#[must_use]
pub fn new_volume(id: VolumeId, volume: &VolumeSpec, machine: usize) -> NewVolume {
    let members = volume.members.iter().zip(0..).filter(|((at, _), _)| *at == machine);
    let members = members.map(|((_, drive), member)| MemberNamespace {
        member: Member(member),
        nsid: *drive as u32 + 1,
    });
    let streams = if volume.engine.is_logged() { volume.streams } else { 0 };
    NewVolume { id, streams, slots: volume.slots, members: members.collect() }
}
