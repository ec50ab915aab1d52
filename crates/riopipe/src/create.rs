//! Creating a volume.
//!
//! 1. Start the threads of the targets, which set up the associations ([`Targets`]).
//! 2. Run the [`VolumeCreation`] to its end. It decides each request: it makes the log partitions,
//!    then writes the labels.
//! 3. Inspect the new volume, to return its properties.

use std::time::Duration;

use riopipe_net::now_ns;
use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_session::initiator::volume::creation::{VolumeCreation, VolumeCreationConfig};
use riopipe_session::initiator::volume::error::VolumeCreateError;

use crate::addr::MemberAddr;
use crate::association::Targets;
use crate::call_error::CallError;
use crate::create_error::CreateError;
use crate::create_error::lack_text;
use crate::error::OpenError;
use crate::identity::{ConnectOptions, random_id};
use crate::info::VolumeInfo;
use crate::open::inspect;

/// The options for a new volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// The size of a stripe unit, in blocks.
    pub unit_blocks: u32,
    /// The number of streams, 1 to 1024.
    pub streams: u16,
    /// The engine of the volume. `None`: `rio` if every target has Rio's extension and an ordering
    /// log, else `sync` (trap T17).
    pub engine: Option<EngineKind>,
    /// Log slots for each stream on each target. 0: as many as fit.
    pub slots: u32,
    /// Blocks of 4096 bytes on each drive for the prepare area of engine `horae`, to which updates in
    /// place are redirected. `None`: 1024 for each stream, but at most a sixteenth of the drive; 0: no
    /// such area. At least 64 for each stream.
    pub prepare_blocks: Option<u32>,
    /// Use drives that are in use. What a drive holds, such as a file system, is lost, and its
    /// signatures are erased. If a drive belongs to a volume already, that volume and all its data
    /// are lost, also if it waits for recovery. A volume that has an owner is refused. The logs of the targets given
    /// here forget the old volume once the new labels are written, or before that where the log has
    /// no space for both or the old volume waits for recovery. A creation that fails after that may
    /// have dropped the old volume's log already.
    pub force: bool,
    /// The options of the connections.
    pub connect: ConnectOptions,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            unit_blocks: 16,
            streams: 8,
            engine: None,
            slots: 0,
            prepare_blocks: None,
            force: false,
            connect: ConnectOptions::default(),
        }
    }
}

/// The longest sleep until the next check. An event of a target ends the sleep early.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

pub(crate) fn create(
    name: &str,
    members: &[MemberAddr],
    options: &CreateOptions,
) -> Result<VolumeInfo, CreateError> {
    run_creation(name, members, options)?;
    let inspected = inspect(Some(name), members, &options.connect);
    inspected.map(|(info, _)| info).map_err(|error| match error {
        OpenError::Attach(error) => CreateError::Attach(error),
        OpenError::Topology(error) => CreateError::Topology(error),
        other => {
            tracing::error!(error = %other, "a volume that was just created can't be inspected");
            CreateError::ReadBack(Box::new(other))
        }
    })
}

/// Creates the volume on its targets.
fn run_creation(
    name: &str,
    members: &[MemberAddr],
    options: &CreateOptions,
) -> Result<(), CreateError> {
    let (places, target_addrs) = Targets::places_of(members);
    let config = VolumeCreationConfig {
        name: name.into(),
        volume: VolumeId(random_id().map_err(CreateError::Random)?),
        places,
        targets: target_addrs.len(),
        unit_blocks: options.unit_blocks,
        streams: options.streams,
        engine: options.engine,
        slots: options.slots,
        prepare_blocks: options.prepare_blocks,
        force: options.force,
        crc32c: crate::crc32c,
    };
    let mut creation = VolumeCreation::new(config).map_err(|error| match error {
        VolumeCreateError::Options(error) => error.into(),
        // Before the first request to a target, `VolumeCreation` finds no other error than a bad
        // name.
        _ => CreateError::Name,
    })?;
    let targets = Targets::start(members, &options.connect)?;
    loop {
        let seen = targets.signal.count();
        creation.advance(now_ns(), &mut &targets);
        if let Some(lacking) = creation.take_fallback() {
            let (target, why) = (targets.name(lacking.target), lack_text(lacking.what));
            tracing::warn!(%target, why, "creating the volume for engine sync");
        }
        if let Some(result) = creation.take_result() {
            return match result {
                Ok(_) => Ok(()),
                Err(error) => Err(create_error(members, &targets, options, error)),
            };
        }
        targets.signal.wait(seen, SLEEP_MAX);
    }
}

/// The error of the call for an error of the creation: with addresses in the place of numbers.
fn create_error(
    members: &[MemberAddr],
    targets: &Targets,
    options: &CreateOptions,
    error: VolumeCreateError,
) -> CreateError {
    let addr = |member: usize| members[member].clone();
    match error {
        VolumeCreateError::Name => CreateError::Name,
        VolumeCreateError::Options(error) => error.into(),
        VolumeCreateError::Attach(failed) => targets.attach_error(failed).into(),
        VolumeCreateError::NoNamespace { member } => {
            let have = targets.nsids(targets.places[member].target);
            CreateError::NoNamespace { member: addr(member), have }
        }
        VolumeCreateError::DuplicateMember { member } => CreateError::Twice(addr(member)),
        VolumeCreateError::SameNguid { member } => CreateError::SameNguid(addr(member)),
        VolumeCreateError::BlockSize { member, size } => {
            CreateError::BlockSize { member: addr(member), size }
        }
        VolumeCreateError::TooSmall { member, blocks, needed } => {
            CreateError::TooSmall { member: addr(member), blocks, needed }
        }
        VolumeCreateError::InUse { member, volume } => {
            CreateError::InUse { member: addr(member), volume }
        }
        VolumeCreateError::UnreadableLabel { member, error } => {
            CreateError::UnreadableLabel { member: addr(member), error }
        }
        VolumeCreateError::HoldsData { member, content } => {
            CreateError::HoldsData { member: addr(member), content }
        }
        VolumeCreateError::Owned { member, volume, owner } => {
            CreateError::Owned { member: addr(member), volume, owner }
        }
        VolumeCreateError::Engine { engine, lacking } => {
            let target = targets.name(lacking.target);
            CreateError::Engine { engine, target, lack: lacking.what }
        }
        VolumeCreateError::LogTooSmall { target, need, free, volumes } => {
            let volumes = volumes.iter().map(|volume| (volume.id, volume.bytes)).collect();
            CreateError::LogTooSmall { target: targets.name(target), need, free, volumes }
        }
        VolumeCreateError::TooFewSlots { target, slots, needed } => {
            CreateError::TooFewSlots { target: targets.name(target), have: slots, need: needed }
        }
        VolumeCreateError::PrepareAreaTooSmall { blocks, needed } => {
            CreateError::PrepareAreaTooSmall { blocks, needed }
        }
        VolumeCreateError::LogDirectoryFull { target, volumes } => {
            CreateError::LogDirectoryFull { target: targets.name(target), volumes }
        }
        VolumeCreateError::TooManySlots { target, slots, most } => {
            CreateError::TooManySlots { target: targets.name(target), slots, most }
        }
        VolumeCreateError::Topology(error) => error.into(),
        VolumeCreateError::Call { target, doing, source } => {
            let source = CallError::of(source, options.connect.timeout);
            CreateError::Call { target: targets.name(target), doing, source }
        }
    }
}
