//! The drives and targets of a volume: found, and checked against their labels.

use std::sync::Arc;

use riopipe_order::attribute::Member;
use riopipe_order::log_region::MemberNamespace;
use riopipe_order::topology::{MemberInfo as MemberPlace, ServerInfo, Topology};
use riopipe_session::claim::is_behind;
use riopipe_session::initiator::attach::Namespace;
use riopipe_session::initiator::opening::{OpeningConfig, OpeningMember, OpeningServer};
use riopipe_session::label::{DATA_START, Found, Label, log_due};
use riopipe_session::label_work::{LabelIo, Relabel, generation, judge};
use riopipe_session::wire::{self, LogKind, VolumeStatus};

use crate::addr::MemberAddr;
use crate::association::Association;
use crate::drive_io::{Drives, label_io, read_label};
use crate::errand::Errand;
use crate::error::{AttachError, CallError, OpenError};
use crate::identity::ConnectOptions;
use crate::info::{MemberInfo, VolumeInfo};

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
        let mut firsts: Vec<&MemberAddr> = Vec::new();
        let targets = members.iter().map(|member| {
            firsts.iter().position(|first| first.same_target(member)).unwrap_or_else(|| {
                firsts.push(member);
                firsts.len() - 1
            })
        });
        let targets: Vec<usize> = targets.collect();
        let signal = Arc::default();
        let associations =
            at_once(&firsts, |member| Association::attach(member, connect, &signal))?;
        let places = targets.into_iter().zip(members).map(|(at, member)| {
            let namespaces = &associations[at].controller.namespaces;
            (at, namespaces.iter().find(|n| n.nsid == member.nsid).cloned())
        });
        let places = places.collect();
        Ok(Self { associations, places })
    }

    /// The namespace ids that a target has, for error messages.
    pub(crate) fn nsids(&self, target: usize) -> Vec<u32> {
        self.associations[target].controller.namespaces.iter().map(|n| n.nsid).collect()
    }

    pub(crate) fn drives(&self) -> Result<Vec<Drives>, crate::AttachError> {
        at_once(&self.associations, |association| Drives::open(association.target()))
    }
}

/// Does something with every target at once, so that a slow one keeps no other waiting. All are
/// waited for, and every failure is told.
pub(crate) fn at_once<I: Sync, T: Send>(
    targets: &[I],
    work: impl Fn(&I) -> Result<T, AttachError> + Sync,
) -> Result<Vec<T>, AttachError> {
    let work = &work;
    let results: Vec<Result<T, AttachError>> = std::thread::scope(|scope| {
        let begin = |target| {
            let thread = std::thread::Builder::new().name("riopipe-attach".into());
            // Without a thread for it, it has to wait for its turn.
            thread.spawn_scoped(scope, move || work(target)).map_err(|_| target)
        };
        let threads: Vec<_> = targets.iter().map(begin).collect();
        let end = |thread: Result<std::thread::ScopedJoinHandle<'_, _>, _>| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(target) => work(target),
        };
        threads.into_iter().map(end).collect()
    });
    let (mut done, mut failed) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(one) => done.push(one),
            Err(error) => failed.push(error),
        }
    }
    match failed.len() {
        0 => Ok(done),
        1 => Err(failed.remove(0)),
        _ => Err(AttachError::Several(failed)),
    }
}

/// The members of a volume, as their labels describe them.
pub(crate) struct MemberSet {
    /// As they were given.
    pub(crate) addrs: Vec<MemberAddr>,
    /// Which target each is on.
    pub(crate) places: Vec<usize>,
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) labels: Vec<Label>,
    pub(crate) head: Label,
}

/// A volume all of whose members are there.
pub(crate) struct Assembled {
    pub(crate) targets: Targets,
    pub(crate) drives: Vec<Drives>,
    pub(crate) set: MemberSet,
}

impl Assembled {
    pub(crate) fn new(
        name: Option<&str>,
        members: &[MemberAddr],
        accept_lost_log: bool,
        connect: &ConnectOptions,
    ) -> Result<Self, OpenError> {
        let targets = Targets::attach(members, connect)?;
        let drives = targets.drives()?;
        let mut namespaces = Vec::new();
        let mut found = Vec::new();
        for (member, (target, namespace)) in members.iter().zip(&targets.places) {
            let Some(namespace) = namespace else {
                let (member, have) = (member.to_string(), targets.nsids(*target));
                return Err(OpenError::NoNamespace { member, have });
            };
            let association = &targets.associations[*target];
            let label = read_label(&drives[*target], namespace.nsid)
                .map_err(|e| call(&association.name(), "reading the label", e))?;
            let extension = association.controller.extension;
            let region = extension.filter(|e| e.log_kind != LogKind::None).map(|e| e.region);
            found.push(Found { nguid: namespace.nguid, region, label });
            namespaces.push(namespace.clone());
        }
        let head = judge(name, &found, accept_lost_log).map_err(|error| OpenError::Assemble {
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
        let places = targets.places.iter().map(|(target, _)| *target).collect();
        let set = MemberSet { addrs: members.to_vec(), places, namespaces, labels, head };
        Ok(Self { targets, drives, set })
    }

    /// What every target that speaks the extension knows of the volume.
    pub(crate) fn statuses(&mut self) -> Result<Vec<(usize, VolumeStatus)>, OpenError> {
        let volume = self.set.head.volume;
        let mut statuses = Vec::new();
        for (at, association) in self.targets.associations.iter().enumerate() {
            if association.controller.extension.is_some() {
                let status = association
                    .volume_status(volume)
                    .map_err(|e| call(&association.name(), "asking for the volume's state", e))?;
                statuses.push((at, status));
            }
        }
        Ok(statuses)
    }

    /// The volume as recovery sees it.
    pub(crate) fn opening(&self) -> OpeningConfig {
        let servers = self.targets.associations.iter().enumerate().map(|(at, association)| {
            let controller = &association.controller;
            let members = members_on(&self.targets, &self.set.namespaces, at);
            OpeningServer {
                present: true,
                speaks: controller.extension.is_some(),
                logged: self.set.logged(at),
                transfer_bytes_max: controller.mdts_bytes as usize,
                members: members
                    .into_iter()
                    .map(|place| OpeningMember {
                        place,
                        start: DATA_START,
                        blocks: self.set.labels[usize::from(place.member.0)].data_blocks,
                        volatile: controller.vwc,
                    })
                    .collect(),
            }
        });
        OpeningConfig { volume: self.set.head.volume, servers: servers.collect() }
    }

    /// How the members lie on the targets, whose logs have room as `statuses` tells.
    pub(crate) fn topology(
        &self,
        statuses: &[(usize, VolumeStatus)],
    ) -> Result<Topology, OpenError> {
        let slots = |target| statuses.iter().find(|(at, _)| *at == target).map(|(_, s)| s.slots);
        let servers = (0..self.targets.associations.len())
            .map(|target| ServerInfo { slots: slots(target).unwrap_or(0) });
        let places = self.set.places.iter().zip(&self.set.labels).map(|(target, label)| {
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
        Ok(Topology::new(places.collect(), servers.collect(), self.set.head.unit_blocks)?)
    }

    pub(crate) fn info(&self, statuses: &[(usize, VolumeStatus)], blocks: u64) -> VolumeInfo {
        let of = |target: usize| statuses.iter().find(|(at, _)| *at == target).map(|(_, s)| s);
        let generation = self.set.label_generation();
        let members = self.set.addrs.iter().zip(&self.set.places).zip(&self.set.namespaces);
        VolumeInfo {
            name: self.set.head.name.clone(),
            id: self.set.head.volume,
            block_size: self.set.head.block_size,
            blocks,
            unit_blocks: self.set.head.unit_blocks,
            streams: self.set.head.streams,
            generation,
            engine: self.set.head.engine,
            members: members
                .map(|((addr, target), namespace)| {
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
                        log_lost: status.is_some_and(|s| {
                            s.log_lost || self.set.logged(*target) && is_behind(s, generation)
                        }),
                    }
                })
                .collect(),
        }
    }
}

impl MemberSet {
    /// The largest generation on any label.
    pub(crate) fn label_generation(&self) -> u32 {
        generation(&self.labels)
    }

    /// Whether the labels say that a log is due on a target.
    pub(crate) fn logged(&self, target: usize) -> bool {
        let labels = self.places.iter().zip(&self.labels);
        labels.filter(|(at, _)| **at == target).any(|(_, label)| log_due(label).is_some())
    }

    /// Nobody else writes labels now that the volume is taken; somebody may have before. Then
    /// marks every label with the new owner's generation. `regions` are the targets' logs, if any of
    /// them is given up.
    pub(crate) fn relabel(
        &mut self,
        errand: &mut Errand<'_>,
        regions: Option<&[[u8; 16]]>,
    ) -> Result<(), OpenError> {
        let nguids = self.namespaces.iter().map(|namespace| namespace.nguid).collect();
        let regions = regions.map(|all| self.places.iter().map(|target| all[*target]).collect());
        let generation = errand.opening.generation();
        let mut work = Relabel::new(&self.head, nguids, generation, regions, crate::crc32c);
        while let Some(io) = work.next() {
            let (LabelIo::Read { member }
            | LabelIo::Flush { member }
            | LabelIo::Write { member, .. }) = io;
            let doing = match io {
                LabelIo::Read { .. } => "reading the label",
                LabelIo::Flush { .. } | LabelIo::Write { .. } => "writing the label",
            };
            let (name, drives) = errand.drives(self.places[member]);
            let read = label_io(drives, self.namespaces[member].nsid, &io)
                .map_err(|error| call(name, doing, error))?;
            work.done(&read).map_err(|error| {
                let members = self.addrs.iter().map(ToString::to_string).collect();
                OpenError::Assemble { members, error }
            })?;
        }
        self.labels = work.into_labels();
        Ok(())
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

pub(crate) fn call(target: &str, doing: &'static str, source: CallError) -> OpenError {
    OpenError::Call { target: target.into(), doing, source }
}

/// Looks at a volume without taking it.
pub(crate) fn inspect(
    members: &[MemberAddr],
    connect: &ConnectOptions,
) -> Result<VolumeInfo, OpenError> {
    let mut assembled = Assembled::new(None, members, true, connect)?;
    let statuses = assembled.statuses()?;
    // Room in the logs does not matter for the volume's size, but there must be some.
    let room: Vec<_> = (0..assembled.targets.associations.len())
        .map(|at| (at, VolumeStatus { slots: 1, ..VolumeStatus::default() }))
        .collect();
    let blocks = assembled.topology(&room)?.blocks();
    Ok(assembled.info(&statuses, blocks))
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
