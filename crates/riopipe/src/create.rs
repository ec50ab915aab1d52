//! Making a volume: check everything first, then make room in the logs, then label the drives.

use riopipe_order::attribute::VolumeId;
use riopipe_order::engine::EngineKind;
use riopipe_order::topology::{MemberInfo as MemberPlace, ServerInfo, Topology};
use riopipe_session::initiator::attach::Namespace;
use riopipe_session::label::{DATA_START, Label, MEMBERS_MAX, MemberId, NAME_MAX};
use riopipe_session::wire::{self, Claim, LogKind, STREAMS_MAX};

use crate::addr::MemberAddr;
use crate::assemble::{Targets, inspect, members_on};
use crate::association::Association;
use crate::drive_io::{Drives, blank_data, read_label, write_label};
use crate::error::{CallError, CreateError, OpenError};
use crate::identity::random_id;
use crate::info::VolumeInfo;
use crate::target::CallData;
use crate::volume::CreateOptions;

pub(crate) fn create(
    name: &str,
    members: &[MemberAddr],
    options: &CreateOptions,
) -> Result<VolumeInfo, CreateError> {
    if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
        return Err(CreateError::Name);
    }
    if members.is_empty() || members.len() > MEMBERS_MAX {
        return Err(CreateError::Options("a volume has 1 to 120 members"));
    }
    let crowded = |m: &MemberAddr| members.iter().filter(|n| n.same_target(m)).count() > 16;
    if members.iter().any(crowded) {
        return Err(CreateError::Options("a volume has at most 16 members on one target"));
    }
    if !(1..=STREAMS_MAX).contains(&options.streams) {
        return Err(CreateError::Options("a volume has 1 to 1024 streams"));
    }
    if options.unit_blocks == 0 || options.unit_blocks > 1 << 20 {
        return Err(CreateError::Options("a stripe unit has 1 to 1048576 blocks"));
    }
    let targets = Targets::attach(members, &options.connect)?;
    let namespaces = checked(members, &targets, options)?;
    let engine = choose_engine(&targets, options)?;
    let drives = targets.drives()?;
    let mut creation = Creation {
        label: label(name, options, engine, &targets, &namespaces)?,
        targets,
        namespaces,
        forgotten: Vec::new(),
    };
    creation.clear_old(members, &drives, options)?;
    creation.make_room(options)?;
    let ready = creation.check_slots().and_then(|()| creation.still_free(members, &drives));
    if let Err(error) = ready.and_then(|()| creation.write_labels(&drives)) {
        creation.forget(creation.label.volume);
        return Err(error);
    }
    creation.release()?;
    drop((creation, drives));
    inspect(members, &options.connect).map_err(|error| match error {
        OpenError::Attach(error) => CreateError::Attach(error),
        OpenError::Topology(error) => CreateError::Topology(error),
        other => {
            tracing::error!(error = %other, "a volume that was just made can't be looked at");
            CreateError::Options("the volume was made, but does not read back as written")
        }
    })
}

/// The namespaces, each of a kind that a volume can use.
fn checked(
    members: &[MemberAddr],
    targets: &Targets,
    options: &CreateOptions,
) -> Result<Vec<Namespace>, CreateError> {
    let mut namespaces: Vec<Namespace> = Vec::new();
    for (member, (target, namespace)) in members.iter().zip(&targets.places) {
        let text = member.to_string();
        let Some(namespace) = namespace else {
            return Err(CreateError::NoNamespace { member: text, have: targets.nsids(*target) });
        };
        for (earlier, (at, _)) in namespaces.iter().zip(&targets.places) {
            if at == target && earlier.nsid == namespace.nsid {
                return Err(CreateError::Twice(text));
            }
            if namespace.nguid != [0; 16] && earlier.nguid == namespace.nguid {
                return Err(CreateError::SameNguid(text));
            }
        }
        if namespace.block_size != wire::BLOCK_BYTES as u32 || namespace.metadata != 0 {
            return Err(CreateError::BlockSize { member: text, size: namespace.block_size });
        }
        let needed = DATA_START + u64::from(options.unit_blocks);
        if namespace.blocks < needed {
            let blocks = namespace.blocks;
            return Err(CreateError::TooSmall { member: text, blocks, needed });
        }
        namespaces.push(namespace.clone());
    }
    Ok(namespaces)
}

fn choose_engine(targets: &Targets, options: &CreateOptions) -> Result<EngineKind, CreateError> {
    let engine = options.engine.unwrap_or(EngineKind::Rio);
    if engine != EngineKind::Rio {
        return Ok(engine);
    }
    for association in &targets.associations {
        let why = match association.controller.extension {
            None => "it does not speak Rio's extension",
            Some(extension) if extension.log_kind == LogKind::None => {
                "it has no ordering log: start it with --log"
            }
            Some(_) => continue,
        };
        if options.engine.is_some() {
            return Err(CreateError::Engine { engine, target: association.name(), why });
        }
        tracing::warn!(target = %association.name(), why, "making the volume for engine sync");
        return Ok(EngineKind::Sync);
    }
    Ok(engine)
}

fn label(
    name: &str,
    options: &CreateOptions,
    engine: EngineKind,
    targets: &Targets,
    namespaces: &[Namespace],
) -> Result<Label, CreateError> {
    let unit = u64::from(options.unit_blocks);
    let blocks =
        namespaces.iter().map(|n| (n.blocks - DATA_START) / unit * unit).min().unwrap_or(0);
    let member = |(target, namespace): (usize, &Namespace)| {
        let extension = targets.associations[target].controller.extension;
        let region = extension.filter(|_| engine == EngineKind::Rio).map_or([0; 16], |e| e.region);
        MemberId { nguid: namespace.nguid, region }
    };
    let places = targets.places.iter().map(|(target, _)| *target).zip(namespaces);
    // The same check that opening will make.
    let members = targets.places.iter().map(|(target, _)| MemberPlace {
        server: *target as u16,
        start: DATA_START,
        blocks,
        request_blocks_max: 1,
        volatile: false,
    });
    let servers = vec![ServerInfo { slots: 0 }; targets.associations.len()];
    Topology::new(members.collect(), servers, options.unit_blocks)?;
    Ok(Label {
        volume: VolumeId(random_id().map_err(CreateError::Random)?),
        name: name.into(),
        block_size: wire::BLOCK_BYTES as u32,
        unit_blocks: options.unit_blocks,
        data_blocks: blocks,
        streams: options.streams,
        engine,
        index: 0,
        generation: 1,
        sequence: 1,
        members: places.map(member).collect(),
    })
}

struct Creation {
    targets: Targets,
    namespaces: Vec<Namespace>,
    label: Label,
    /// Volumes that the drives belonged to, and that were to be forgotten.
    forgotten: Vec<VolumeId>,
}

impl Creation {
    /// Refuses drives that belong to a volume, or makes them forget it.
    fn clear_old(
        &mut self,
        members: &[MemberAddr],
        drives: &[Drives],
        options: &CreateOptions,
    ) -> Result<(), CreateError> {
        let mut old = Vec::new();
        for (index, member) in members.iter().enumerate() {
            let target = self.targets.places[index].0;
            let label = read_label(&drives[target], self.namespaces[index].nsid)
                .map_err(|e| call(&self.targets.associations[target], "reading the label", e))?;
            let Ok(label) = label else { continue };
            if !options.force {
                let (member, volume) = (member.to_string(), label.name);
                return Err(CreateError::InUse { member, volume });
            }
            let association = &mut self.targets.associations[target];
            if association.controller.extension.is_some() {
                let status = association
                    .volume_status(label.volume)
                    .map_err(|e| call(association, "asking for the old volume's state", e))?;
                if status.owned {
                    let (member, volume) = (member.to_string(), label.name);
                    return Err(CreateError::Owned { member, volume, owner: status.owner });
                }
            }
            old.push(label.volume);
        }
        old.sort();
        old.dedup();
        for volume in &old {
            self.forget(*volume);
        }
        self.forgotten = old;
        Ok(())
    }

    /// Claims the volume on every target that speaks the extension, with room in its log.
    fn make_room(&mut self, options: &CreateOptions) -> Result<(), CreateError> {
        for at in 0..self.targets.associations.len() {
            if self.targets.associations[at].controller.extension.is_none() {
                continue;
            }
            let claim = Claim {
                volume: self.label.volume,
                generation: 1,
                create: true,
                give_up: false,
                take_over: false,
                unlogged: self.label.engine != EngineKind::Rio,
                resume: false,
                streams: options.streams,
                slots: options.slots,
                lease_ms: 0,
                members: members_on(&self.targets, &self.namespaces, at),
            };
            let association = &mut self.targets.associations[at];
            let asked = association.ask(wire::claim_command(), CallData::Bytes(&claim.encode()));
            let target = association.name();
            let error = match asked {
                Ok((cqe, _)) if cqe.status().is_ok() => continue,
                Ok((cqe, _)) if cqe.status().is(wire::status::LOG_TOO_SMALL) => {
                    let (need, free) = (cqe.result() as u32, (cqe.result() >> 32) as u32);
                    CreateError::LogTooSmall { target, need, free }
                }
                Ok((cqe, _)) => {
                    call(association, "making room in its log", CallError::Status(cqe.status()))
                }
                Err(source) => call(association, "making room in its log", source),
            };
            self.forget(self.label.volume);
            return Err(error);
        }
        Ok(())
    }

    /// Whether each log has room for more than the flushes that it must always have room for.
    fn check_slots(&mut self) -> Result<(), CreateError> {
        if self.label.engine != EngineKind::Rio {
            return Ok(());
        }
        for at in 0..self.targets.associations.len() {
            let members = self.targets.places.iter().filter(|(t, _)| *t == at).count() as u32;
            let association = &mut self.targets.associations[at];
            let status = association
                .volume_status(self.label.volume)
                .map_err(|e| call(association, "asking for the volume's state", e))?;
            let need = 2 * members + 2;
            if status.slots < need {
                let (target, have) = (association.name(), status.slots);
                return Err(CreateError::TooFewSlots { target, have, need });
            }
        }
        Ok(())
    }

    /// Between reading the labels and taking the volume, another volume may have been made of the
    /// same drives; since then nobody else writes there.
    fn still_free(&self, members: &[MemberAddr], drives: &[Drives]) -> Result<(), CreateError> {
        for (index, member) in members.iter().enumerate() {
            let target = self.targets.places[index].0;
            let label = read_label(&drives[target], self.namespaces[index].nsid)
                .map_err(|e| call(&self.targets.associations[target], "reading the label", e))?;
            if let Ok(label) = label
                && !self.forgotten.contains(&label.volume)
            {
                let (member, volume) = (member.to_string(), label.name);
                return Err(CreateError::InUse { member, volume });
            }
        }
        Ok(())
    }

    /// Both copies of every label.
    fn write_labels(&mut self, drives: &[Drives]) -> Result<(), CreateError> {
        for (index, namespace) in self.namespaces.iter().enumerate() {
            let target = self.targets.places[index].0;
            blank_data(&drives[target], namespace.nsid)
                .map_err(|e| call(&self.targets.associations[target], "writing the label", e))?;
            for sequence in [1, 2] {
                let label = Label { index: index as u16, sequence, ..self.label.clone() };
                write_label(&drives[target], namespace.nsid, &label).map_err(|e| {
                    call(&self.targets.associations[target], "writing the label", e)
                })?;
            }
        }
        Ok(())
    }

    fn release(&mut self) -> Result<(), CreateError> {
        for association in &mut self.targets.associations {
            if association.controller.extension.is_some() {
                association
                    .call(wire::release_command(self.label.volume, false), CallData::None)
                    .map_err(|e| call(association, "giving the volume back", e))?;
            }
        }
        Ok(())
    }

    /// Makes the targets forget a volume; those that never knew it say so, which is as good.
    fn forget(&mut self, volume: VolumeId) {
        for association in &mut self.targets.associations {
            if association.controller.extension.is_some() {
                let _ = association.ask(wire::release_command(volume, true), CallData::None);
            }
        }
    }
}

fn call(association: &Association, doing: &'static str, source: CallError) -> CreateError {
    CreateError::Call { target: association.name(), doing, source }
}
