//! Opening a volume: attach, check every label, ask every target, and only then take it.

use std::collections::BTreeSet;
use std::sync::Mutex;

use riopipe_nvme::command::Sqe;
use riopipe_order::attribute::{Member, Seq, StreamId};
use riopipe_order::engine::EngineKind;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::topology::{MemberInfo as MemberPlace, Topology};
use riopipe_session::claim::{ClaimError, Intent, Plan, plan};
use riopipe_session::initiator::attach::Namespace;
use riopipe_session::initiator::stream::{FlushFailures, ReplayBoard};
use riopipe_session::label::{
    AssembleError, DATA_START, Found, Label, assemble, log_due, logs_due,
};
use riopipe_session::wire::{self, Claim, LogKind, VolumeStatus};

use crate::addr::MemberAddr;
use crate::association::{Association, CallData};
use crate::drive_io::{DriveIo, LABEL_QUEUE};
use crate::error::{CallError, OpenError};
use crate::identity::ConnectOptions;
use crate::info::{MemberInfo, VolumeInfo};
use crate::volume::{Inner, OpenOptions, Recovery, Server, SharedLedger};

/// Blocks of one request at most, whatever the target would take: beyond 128 KiB nothing is
/// gained, and a smaller unit shares the connection better.
const REQUEST_BLOCKS_MAX: u32 = 32;

/// The targets of a member list, each attached once, and where each member is.
pub(crate) struct Targets {
    pub(crate) associations: Vec<Association>,
    /// For each member: its target and namespace.
    pub(crate) places: Vec<(usize, Option<Namespace>)>,
}

impl Targets {
    pub(crate) fn attach(
        members: &[MemberAddr],
        connect: &ConnectOptions,
    ) -> Result<Self, crate::AttachError> {
        let mut associations: Vec<Association> = Vec::new();
        let mut firsts: Vec<&MemberAddr> = Vec::new();
        let mut places = Vec::new();
        for member in members {
            let at = match firsts.iter().position(|first| first.same_target(member)) {
                Some(at) => at,
                None => {
                    associations.push(Association::attach(member, connect)?);
                    firsts.push(member);
                    associations.len() - 1
                }
            };
            let namespaces = &associations[at].controller.namespaces;
            let namespace = namespaces.iter().find(|n| n.nsid == member.nsid).cloned();
            places.push((at, namespace));
        }
        Ok(Self { associations, places })
    }

    /// The namespace ids that a target has, for error messages.
    pub(crate) fn nsids(&self, target: usize) -> Vec<u32> {
        self.associations[target].controller.namespaces.iter().map(|n| n.nsid).collect()
    }

    pub(crate) fn drives(
        &self,
        connect: &ConnectOptions,
    ) -> Result<Vec<DriveIo>, crate::AttachError> {
        self.associations.iter().map(|a| DriveIo::open(a, connect)).collect()
    }
}

struct Assembled {
    targets: Targets,
    drives: Vec<DriveIo>,
    namespaces: Vec<Namespace>,
    labels: Vec<Label>,
    head: Label,
}

impl Assembled {
    fn new(
        name: Option<&str>,
        members: &[MemberAddr],
        accept_lost_log: bool,
        connect: &ConnectOptions,
    ) -> Result<Self, OpenError> {
        let targets = Targets::attach(members, connect)?;
        let mut drives = targets.drives(connect)?;
        let mut namespaces = Vec::new();
        let mut found = Vec::new();
        for (member, (target, namespace)) in members.iter().zip(&targets.places) {
            let Some(namespace) = namespace else {
                let (member, have) = (member.to_string(), targets.nsids(*target));
                return Err(OpenError::NoNamespace { member, have });
            };
            let label = drives[*target]
                .label(namespace.nsid)
                .map_err(|e| call(&targets.associations[*target], "reading the label", e))?;
            let extension = targets.associations[*target].controller.extension;
            let region = extension.filter(|e| e.log_kind != LogKind::None).map(|e| e.region);
            found.push(Found { nguid: namespace.nguid, region, label });
            namespaces.push(namespace.clone());
        }
        let checked = assemble(name, &found).and_then(|head| {
            if accept_lost_log { Ok(head) } else { logs_due(&found).map(|()| head) }
        });
        let head = checked.map_err(|error| OpenError::Assemble {
            members: members.iter().map(ToString::to_string).collect(),
            error,
        })?;
        let labels: Vec<Label> = found.into_iter().filter_map(|f| f.label.ok()).collect();
        for ((member, namespace), label) in members.iter().zip(&namespaces).zip(&labels) {
            let (blocks, needed) = (namespace.blocks, DATA_START.saturating_add(label.data_blocks));
            if blocks < needed {
                return Err(OpenError::Shrunk { member: member.to_string(), blocks, needed });
            }
        }
        Ok(Self { targets, drives, namespaces, labels, head })
    }

    /// Nobody else writes labels now that the volume is taken; somebody may have before.
    fn read_labels_again(&mut self, name: &str, members: &[MemberAddr]) -> Result<(), OpenError> {
        let mut found = Vec::new();
        for (index, namespace) in self.namespaces.iter().enumerate() {
            let target = self.targets.places[index].0;
            let label = self.drives[target]
                .label(namespace.nsid)
                .map_err(|e| call(&self.targets.associations[target], "reading the label", e))?;
            found.push(Found { nguid: namespace.nguid, region: None, label });
        }
        let fault = |error| OpenError::Assemble {
            members: members.iter().map(ToString::to_string).collect(),
            error,
        };
        let head = assemble(Some(name), &found).map_err(fault)?;
        if head.volume != self.head.volume {
            return Err(fault(AssembleError::Foreign {
                given: 0,
                name: head.name,
                volume: head.volume,
            }));
        }
        self.labels = found.into_iter().filter_map(|f| f.label.ok()).collect();
        Ok(())
    }

    /// Whether the labels say that a log is due on a target.
    fn logged(&self, target: usize) -> bool {
        self.targets
            .places
            .iter()
            .zip(&self.labels)
            .any(|((at, _), label)| *at == target && log_due(label).is_some())
    }

    /// What every target that speaks the extension knows of the volume.
    fn statuses(&mut self) -> Result<Vec<(usize, VolumeStatus)>, OpenError> {
        let volume = self.head.volume;
        let mut statuses = Vec::new();
        for (at, association) in self.targets.associations.iter_mut().enumerate() {
            if association.controller.extension.is_some() {
                let status = association
                    .volume_status(volume)
                    .map_err(|e| call(association, "asking for the volume's state", e))?;
                statuses.push((at, status));
            }
        }
        Ok(statuses)
    }

    fn plan(&self, intent: &Intent, statuses: &[(usize, VolumeStatus)]) -> Result<Plan, OpenError> {
        let planned = plan(intent, statuses, |target| self.logged(target));
        let at_rest = planned.and_then(|plan| match plan.unrecovered {
            Some((target, entries)) => Err(ClaimError::Unrecovered { target, entries }),
            None => Ok(plan),
        });
        at_rest.map_err(|error| OpenError::Claim {
            volume: self.head.name.clone(),
            target: error
                .target()
                .map_or_else(String::new, |t| self.targets.associations[t].name()),
            error,
        })
    }

    fn topology(&self, slots: &[u32]) -> Result<Topology, OpenError> {
        let places = self.targets.places.iter().zip(&self.labels).map(|((target, _), label)| {
            let controller = &self.targets.associations[*target].controller;
            MemberPlace {
                server: *target as u16,
                start: DATA_START,
                blocks: label.data_blocks,
                request_blocks_max: (controller.mdts_bytes / wire::BLOCK_BYTES as u32)
                    .clamp(1, REQUEST_BLOCKS_MAX),
                volatile: controller.vwc,
            }
        });
        Ok(Topology::new(places.collect(), Inner::server_infos(slots), self.head.unit_blocks)?)
    }

    fn info(
        &self,
        members: &[MemberAddr],
        statuses: &[(usize, VolumeStatus)],
        blocks: u64,
    ) -> VolumeInfo {
        let of = |target: usize| statuses.iter().find(|(at, _)| *at == target).map(|(_, s)| s);
        let members = members.iter().zip(&self.targets.places).zip(&self.namespaces);
        VolumeInfo {
            name: self.head.name.clone(),
            id: self.head.volume,
            block_size: self.head.block_size,
            blocks,
            unit_blocks: self.head.unit_blocks,
            streams: self.head.streams,
            generation: self.labels.iter().map(|l| l.generation).max().unwrap_or(0),
            engine: self.head.engine,
            members: members
                .map(|((addr, (target, _)), namespace)| {
                    let controller = &self.targets.associations[*target].controller;
                    let status = of(*target);
                    MemberInfo {
                        addr: addr.clone(),
                        nqn: controller.subnqn.clone(),
                        nguid: namespace.nguid.iter().map(|b| format!("{b:02x}")).collect(),
                        blocks: namespace.blocks,
                        volatile: controller.vwc,
                        log: log_name(controller.extension.map(|e| e.log_kind)).into(),
                        slots: status.map_or(0, |s| s.slots),
                        owner: status.filter(|s| s.owned && !s.own).map(|s| s.owner.clone()),
                        unrecovered: status.map_or(0, |s| s.live_entries),
                        log_lost: status.is_some_and(|s| s.log_lost),
                    }
                })
                .collect(),
        }
    }
}

fn log_name(kind: Option<LogKind>) -> &'static str {
    match kind {
        None => "foreign",
        Some(LogKind::None) => "none",
        Some(LogKind::File) => "file",
        Some(LogKind::Dax) => "dax",
        Some(LogKind::Block) => "block",
        Some(LogKind::Pci) => "pci",
    }
}

fn call(association: &Association, doing: &'static str, source: CallError) -> OpenError {
    OpenError::Call { target: association.name(), doing, source }
}

pub(crate) fn inspect(
    members: &[MemberAddr],
    connect: &ConnectOptions,
) -> Result<VolumeInfo, OpenError> {
    let mut assembled = Assembled::new(None, members, true, connect)?;
    let statuses = assembled.statuses()?;
    let blocks = assembled.topology(&vec![1; assembled.targets.associations.len()])?.blocks();
    Ok(assembled.info(members, &statuses, blocks))
}

/// Which engine is to run, and why it is not the volume's own if it isn't (T17).
fn choose_engine(
    assembled: &Assembled,
    wanted: Option<EngineKind>,
) -> Result<(EngineKind, Option<String>), OpenError> {
    let engine = wanted.unwrap_or(assembled.head.engine);
    if engine != EngineKind::Rio {
        return Ok((engine, None));
    }
    let foreign = assembled.targets.associations.iter().find(|association| {
        association.controller.extension.is_none_or(|e| e.log_kind == LogKind::None)
    });
    let why = match foreign {
        Some(target) => {
            format!(
                "target {} does not speak Rio's extension or has no ordering log",
                target.name()
            )
        }
        None if assembled.head.engine != EngineKind::Rio => {
            format!(
                "it was made for engine {}, without room in the ordering logs",
                assembled.head.engine
            )
        }
        None => return Ok((engine, None)),
    };
    if wanted.is_some() {
        let volume = assembled.head.name.clone();
        return Err(OpenError::Engine { engine, volume, why });
    }
    tracing::warn!(volume = %assembled.head.name, %why, "falling back to engine sync and its promise");
    Ok((EngineKind::Sync, Some(why)))
}

pub(crate) fn open(
    name: &str,
    members: &[MemberAddr],
    options: &OpenOptions,
) -> Result<(Inner, Recovery), OpenError> {
    let mut assembled =
        Assembled::new(Some(name), members, options.accept_lost_log, &options.connect)?;
    let (engine, fallback) = choose_engine(&assembled, options.engine)?;
    let statuses = assembled.statuses()?;
    let intent = Intent {
        engine,
        take_over: options.take_over,
        accept_lost_log: options.accept_lost_log,
        label_generation: assembled.labels.iter().map(|l| l.generation).max().unwrap_or(0),
        streams: assembled.head.streams,
    };
    let plan = assembled.plan(&intent, &statuses)?;
    claim(&mut assembled, &intent, &statuses, plan.generation)?;

    // Now that nobody else writes: is what the logs hold really at rest, and how far are they?
    let taken = (|| {
        assembled.read_labels_again(name, members)?;
        let statuses = assembled.statuses()?;
        let plan = assembled.plan(&intent, &statuses)?;
        for index in 0..assembled.labels.len() {
            let (target, _) = assembled.targets.places[index];
            let label = &mut assembled.labels[index];
            label.generation =
                plan_generation(&statuses, target, label.generation, plan.generation);
            label.sequence = label.sequence.wrapping_add(1);
            if options.accept_lost_log && log_due(label).is_some() {
                // The log that is due from now on is the one that is there.
                let extension = assembled.targets.associations[target].controller.extension;
                let own = usize::from(label.index);
                label.members[own].region = extension.map_or([0; 16], |e| e.region);
            }
            let nsid = assembled.namespaces[index].nsid;
            assembled.drives[target].write_label(nsid, label).map_err(|e| {
                call(&assembled.targets.associations[target], "writing the label", e)
            })?;
        }
        Ok((statuses, plan))
    })();
    let (statuses, after) = match taken {
        Ok(taken) => taken,
        Err(error) => {
            release(&mut assembled);
            return Err(error);
        }
    };

    let slots: Vec<u32> = (0..assembled.targets.associations.len())
        .map(|target| statuses.iter().find(|(at, _)| *at == target).map_or(0, |(_, s)| s.slots))
        .collect();
    let topology = match assembled.topology(&slots) {
        Ok(topology) => topology,
        Err(error) => {
            release(&mut assembled);
            return Err(error);
        }
    };
    let info = assembled.info(members, &statuses, topology.blocks());
    let streams =
        after.released.iter().enumerate().map(|(i, seq)| (StreamId(i as u16), *seq)).collect();
    let recovery = Recovery { streams, fallback };
    Ok((
        inner(assembled, options, engine, plan.generation, topology, info, after.released),
        recovery,
    ))
}

/// After the claim the targets have the new generation on record; a target without the extension
/// has only the label.
fn plan_generation(
    statuses: &[(usize, VolumeStatus)],
    target: usize,
    label: u32,
    next: u32,
) -> u32 {
    match statuses.iter().find(|(at, _)| *at == target) {
        Some((_, status)) => status.generation,
        None => next.max(label),
    }
}

fn inner(
    assembled: Assembled,
    options: &OpenOptions,
    engine: EngineKind,
    generation: u32,
    topology: Topology,
    info: VolumeInfo,
    marks: Vec<Seq>,
) -> Inner {
    let servers = assembled.targets.associations.into_iter().map(|association| Server {
        name: association.name(),
        addr: association.addr.clone(),
        queues: Mutex::new(
            (LABEL_QUEUE + 1..=association.controller.queues).collect::<BTreeSet<_>>(),
        ),
        queues_granted: association.controller.queues,
        speaks_rio: association.controller.extension.is_some(),
        association: Mutex::new(association),
    });
    let check = options.check_handover || cfg!(debug_assertions);
    let ledger = (check && engine == EngineKind::Rio).then(SharedLedger::default);
    if let Some(ledger) = &ledger {
        for (stream, mark) in marks.iter().enumerate() {
            ledger.released(StreamId(stream as u16), *mark);
        }
    }
    Inner {
        name: info.name.clone(),
        id: info.id,
        engine,
        generation,
        flush_failures: FlushFailures::new(topology.members().len()),
        replay_board: ReplayBoard::new(topology.servers().len()),
        topology,
        nsids: assembled.namespaces.iter().map(|n| n.nsid).collect(),
        servers: servers.collect(),
        connect: options.connect.clone(),
        marks: Mutex::new(marks),
        streams: Mutex::default(),
        keepers: Mutex::default(),
        ledger,
        info,
    }
}

/// The members of a volume on one target, with their numbers.
pub(crate) fn members_on(
    targets: &Targets,
    namespaces: &[Namespace],
    target: usize,
) -> Vec<MemberNamespace> {
    let places = targets.places.iter().zip(namespaces).enumerate();
    places
        .filter(|(_, ((at, _), _))| *at == target)
        .map(|(i, (_, namespace))| MemberNamespace {
            member: Member(i as u8),
            nsid: namespace.nsid,
        })
        .collect()
}

/// Claims the volume on every target; if one refuses, the others are given back.
fn claim(
    assembled: &mut Assembled,
    intent: &Intent,
    statuses: &[(usize, VolumeStatus)],
    generation: u32,
) -> Result<(), OpenError> {
    for at in 0..assembled.targets.associations.len() {
        if assembled.targets.associations[at].controller.extension.is_none() {
            continue;
        }
        let request = Claim {
            volume: assembled.head.volume,
            generation,
            // A log that was given up is begun anew.
            create: intent.accept_lost_log
                && assembled.logged(at)
                && statuses.iter().any(|(t, s)| *t == at && (!s.known || s.unlogged)),
            take_over: intent.take_over,
            unlogged: !assembled.logged(at),
            resume: false,
            streams: intent.streams,
            slots: 0,
            members: members_on(&assembled.targets, &assembled.namespaces, at),
        };
        let association = &mut assembled.targets.associations[at];
        let data = request.encode();
        let claimed = association.admin.call(wire::claim_command(), CallData::Bytes(&data));
        if let Err(source) = claimed {
            let target = association.name();
            release(assembled);
            return Err(match source {
                CallError::Status(status) if status.is(wire::status::OWNED) => OpenError::Claim {
                    volume: assembled.head.name.clone(),
                    target,
                    error: ClaimError::Owned { target: at, owner: "another host".into() },
                },
                source => OpenError::Call { target, doing: "claiming the volume", source },
            });
        }
    }
    Ok(())
}

/// Gives back what was claimed; a target that can't be told notices when the connection closes.
fn release(assembled: &mut Assembled) {
    let volume = assembled.head.volume;
    for association in &mut assembled.targets.associations {
        if association.controller.extension.is_some() {
            let release: Sqe = wire::release_command(volume, false);
            let _ = association.admin.ask(release, CallData::None);
        }
    }
}
