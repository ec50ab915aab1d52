//! The commands Identify and Get Log Page: they describe the subsystem, its namespaces and its
//! ports to a host.

use alloc::vec::Vec;

use riopipe_nvme::ana;
use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::discovery::{self, Entry, Header};
use riopipe_nvme::fabrics::{CNTLID_ANY, DISCOVERY_NQN, VERSION_2_0};
use riopipe_nvme::feature::event;
use riopipe_nvme::identify::{self, Controller, Descriptors, Namespace, NvmController, cns};
use riopipe_nvme::log_page;
use riopipe_nvme::reservation::RESCAP;

use super::Admin;
use crate::auth::tls::Demand;
use crate::outbox::Outbox;
use crate::target::ana::{ANA_GROUP_MAX, ANA_TRANSITION_S};
use crate::target::closed::Closed;
use crate::target::context::{Context, check_page_buffer};
use crate::target::env::TargetEnv;
use crate::target::events::Events;
use crate::target::identity::{DiscoveryPort, Identity, LocalAddress};
use crate::target::limits::{
    ABORTS_MAX, ADMIN_ENTRIES_MAX, ASYNC_EVENTS_MAX, CONNECTION_BYTES, COPY_BLOCKS_MAX,
    COPY_RANGE_BLOCKS_MAX, COPY_RANGES_MAX, DSM_RANGE_BLOCKS, DSM_RANGES, ERROR_ENTRIES,
    IN_CAPSULE_BYTES, KEEP_ALIVE_STEP_MS, MDTS, QUEUE_ENTRIES_MAX, VSL, WZSL,
};
use crate::target::namespace::{NamespaceConfig, Namespaces};
use crate::target::shared::Controller as SharedController;
use crate::wire;

/// NMIC bit 0: several controllers may have the namespace.
const NMIC_SHARED: u8 = 1;
/// CMIC bit 1: the subsystem has several controllers.
const CMIC_SEVERAL_CONTROLLERS: u8 = 1 << 1;
/// The temperature that a target reports, in kelvins. A target has no thermometer, and hosts print
/// a temperature of 0 as −273 °C.
const TEMPERATURE_K: u16 = 300;
/// The first of the namespace ids after which no list may begin: FFFFFFFEh and FFFFFFFFh.
const NSID_RESERVED: u32 = 0xffff_fffe;
/// The namespace id that stands for all namespaces (Base §3.2.1.2).
const NSID_ALL: u32 = 0xffff_ffff;

impl Admin {
    /// Carries out Identify: sends the data structure that the command selects.
    pub(super) fn identify<E: TargetEnv>(
        &self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        match self.identify_page(context, sqe, env) {
            Ok(page) => context.send_page(sqe, &page, outbox),
            Err(status) => context.send_completion(sqe.cid(), status.with_dnr(), 0, outbox),
        }
        Ok(())
    }

    /// The data structure that an Identify command selects, by CNS and command set.
    fn identify_page<E: TargetEnv>(
        &self,
        context: &Context<E>,
        sqe: &Sqe,
        env: &mut E,
    ) -> Result<[u8; identify::LEN], Status> {
        let Some(queue) = &context.queue else {
            return Err(Status::INTERNAL);
        };
        let nsid = sqe.nsid();
        if self.is_discovery {
            return match sqe.cns() {
                cns::CONTROLLER => {
                    let identity = env.with_shared(|shared| shared.identity().clone());
                    Ok(discovery_controller(&identity, queue.cntlid).encode())
                }
                _ => Err(Status::INVALID_FIELD),
            };
        }
        let namespace = || find_namespace(&context.namespaces, nsid);
        let is_inactive = context.namespaces.is_inactive(nsid);
        let list_starts_after = || match nsid {
            NSID_RESERVED.. => Err(Status::INVALID_NAMESPACE),
            nsid => Ok(nsid),
        };
        // The values of CNS are in Base Figure 273. For an inactive namespace id, the data structures
        // of CNS 00h, 05h, 08h and 11h are all zeroes (NVM Command Set §4.1.5.1, Base §5.17.2.5,
        // §5.17.2.8, §5.17.2.10). All other values that take a namespace id follow the general rule
        // of `find_namespace`.
        match (sqe.cns(), sqe.identify_csi()) {
            (cns::NAMESPACE | cns::ALLOCATED_NAMESPACE | cns::COMMON_NAMESPACE, _)
            | (cns::COMMAND_SET_NAMESPACE, identify::CSI_NVM)
                if is_inactive =>
            {
                Ok([0; identify::LEN])
            }
            (cns::NAMESPACE | cns::ALLOCATED_NAMESPACE, _) => {
                let config = namespace()?;
                let mut page = namespace_page(config).encode();
                wire::put_drive_order(&mut page, config.order);
                Ok(page)
            }
            (cns::CONTROLLER, _) => Ok(io_controller_page(context, queue.cntlid, env)),
            (cns::ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES, _)
            | (cns::COMMAND_SET_ACTIVE_NAMESPACES, identify::CSI_NVM) => {
                Ok(identify::namespace_list(context.namespaces.ids(), list_starts_after()?))
            }
            (cns::NAMESPACE_DESCRIPTORS, _) => Ok(namespace_descriptors(namespace()?).encode()),
            (cns::COMMAND_SET_NAMESPACE, identify::CSI_NVM) => {
                namespace()?;
                Ok(identify::nvm_namespace())
            }
            (cns::COMMAND_SET_CONTROLLER, identify::CSI_NVM) => Ok(limits_of_commands().encode()),
            (cns::COMMON_NAMESPACE, _) => {
                let config = namespace()?;
                Ok(identify::common_namespace(0, NMIC_SHARED, RESCAP, config.ana_group, 0))
            }
            // Base §5.17.2.11: the list of controllers is of one namespace.
            (cns::NAMESPACE_CONTROLLERS, _) if nsid == NSID_ALL => Err(Status::INVALID_FIELD),
            (cns::NAMESPACE_CONTROLLERS | cns::CONTROLLERS, _) => {
                if sqe.cns() == cns::NAMESPACE_CONTROLLERS {
                    namespace()?;
                }
                let ids: Vec<u16> = env.with_shared(|shared| {
                    shared.controllers().filter(|(_, c)| !c.discovery).map(|(id, _)| id).collect()
                });
                Ok(identify::controller_list(ids, sqe.identify_cntid()))
            }
            (cns::COMMAND_SETS, _) => Ok(identify::command_sets()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Carries out Get Log Page: sends the part of a log page that the command selects.
    pub(super) fn log_page<E: TargetEnv>(
        &mut self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        let len = sqe.log_len();
        if len > CONNECTION_BYTES as u64 || !sqe.log_offset().is_multiple_of(4) {
            context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox);
            return Ok(());
        }
        // A page that the host does not get is not read.
        let reads_events = !sqe.log_retain()
            && self.check_log_namespace(context, sqe).is_ok()
            && check_page_buffer(sqe, len as usize).is_ok();
        let end = reads_events.then(|| sqe.log_offset().saturating_add(len));
        let Some(page) = self.whole_log_page(context, sqe, end, env) else {
            context.send_completion(cid, Status::INVALID_LOG_PAGE.with_dnr(), 0, outbox);
            return Ok(());
        };
        if let Err(status) = self.check_log_namespace(context, sqe) {
            context.send_completion(cid, status.with_dnr(), 0, outbox);
            return Ok(());
        }
        match log_page::slice(&page, sqe.log_offset(), len as u32) {
            Ok(part) => context.send_page(sqe, &part, outbox),
            Err(_) => context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox),
        }
        Ok(())
    }

    /// Checks the namespace id of a Get Log Page command.
    ///
    /// Only the SMART page takes the id of a namespace; LPA bit 0 reports that. Its content is the
    /// same for the controller and for each namespace. All other pages have the scope of the
    /// controller or of the subsystem, and take only the ids 0 and FFFFFFFFh (Base §5.16.1). A
    /// discovery controller has no namespaces, and ignores the id.
    fn check_log_namespace<E: TargetEnv>(
        &self,
        context: &Context<E>,
        sqe: &Sqe,
    ) -> Result<(), Status> {
        match (sqe.lid(), sqe.nsid()) {
            _ if self.is_discovery => Ok(()),
            (_, 0 | NSID_ALL) => Ok(()),
            (log_page::SMART, nsid) => find_namespace(&context.namespaces, nsid).map(drop),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// The whole content of the log page that a command selects; `None` if the controller does not
    /// have that page. `end`: the host reads the page up to this offset, and does not retain its
    /// event. What it has read is removed at once, so that no later change is removed with it.
    fn whole_log_page<E: TargetEnv>(
        &self,
        context: &Context<E>,
        sqe: &Sqe,
        end: Option<u64>,
        env: &mut E,
    ) -> Option<Vec<u8>> {
        let discovery = self.is_discovery;
        let read_events = |env: &mut E, page: fn(&Events) -> Vec<u8>| {
            let cntlid = context.queue.as_ref()?.cntlid;
            env.with_shared(|shared| {
                let events = &mut shared.controller_mut(cntlid)?.events;
                let page = page(events);
                if let Some(end) = end
                    && sqe.log_offset() <= page.len() as u64
                {
                    events.on_read(sqe.lid(), end);
                }
                Some(page)
            })
        };
        Some(match sqe.lid() {
            log_page::SUPPORTED if discovery => {
                log_page::supported(&[log_page::SUPPORTED, log_page::DISCOVERY]).to_vec()
            }
            log_page::DISCOVERY if discovery => {
                let hostnqn = context.queue.as_ref().map_or("", |q| &q.hostnqn);
                let cntlid = context.queue.as_ref().map_or(0, |queue| queue.cntlid);
                let (identity, generation, allowed) = env.with_shared(|shared| {
                    if let (Some(end), Some(controller)) = (end, shared.controller_mut(cntlid)) {
                        controller.events.on_read(log_page::DISCOVERY, end);
                    }
                    (
                        shared.identity().clone(),
                        shared.discovery_generation(),
                        shared.allows(hostnqn),
                    )
                });
                discovery_page(&identity, generation, allowed, self.local_address.as_ref())
            }
            _ if discovery => return None,
            log_page::SUPPORTED => log_page::supported(&[
                log_page::SUPPORTED,
                log_page::ERROR,
                log_page::SMART,
                log_page::FIRMWARE,
                log_page::CHANGED_NAMESPACES,
                log_page::EFFECTS,
                log_page::ANA,
                log_page::RESERVATION,
            ])
            .to_vec(),
            log_page::ERROR => of_controller(context, env, |controller| controller.errors.page())?,
            log_page::SMART => log_page::Smart {
                error_entries: of_controller(context, env, |controller| controller.errors.count())?,
                temperature: TEMPERATURE_K,
                spare: 100,
                spare_threshold: 10,
                ..log_page::Smart::default()
            }
            .encode()
            .to_vec(),
            log_page::FIRMWARE => {
                let identity = env.with_shared(|shared| shared.identity().clone());
                log_page::firmware(&identity.firmware).to_vec()
            }
            log_page::CHANGED_NAMESPACES => read_events(env, |events| {
                log_page::changed_namespaces(&events.changed_namespaces()).to_vec()
            })?,
            log_page::EFFECTS => log_page::effects(true).to_vec(),
            log_page::ANA => {
                let cntlid = context.queue.as_ref()?.cntlid;
                env.with_shared(|shared| {
                    if let (Some(end), Some(controller)) = (end, shared.controller_mut(cntlid)) {
                        controller.events.on_read(log_page::ANA, end);
                    }
                    shared.ana_page(cntlid, sqe.log_groups_only())
                })?
            }
            log_page::RESERVATION => read_events(env, |events| events.reservation_page().to_vec())?,
            _ => return None,
        })
    }
}

/// Reads something of the controller of this queue.
fn of_controller<E: TargetEnv, T>(
    context: &Context<E>,
    env: &mut E,
    read: impl FnOnce(&SharedController) -> T,
) -> Option<T> {
    let cntlid = context.queue.as_ref()?.cntlid;
    env.with_shared(|shared| shared.controller(cntlid).map(read))
}

/// The namespace of a command that takes the id of one namespace.
///
/// # Errors
/// The status for an id without a namespace (Base Figure 87, NSID): Invalid Field in Command if the
/// id is inactive, Invalid Namespace or Format if it is not valid.
fn find_namespace(namespaces: &Namespaces, nsid: u32) -> Result<&NamespaceConfig, Status> {
    match namespaces.find(nsid) {
        Some((_, namespace)) => Ok(&namespace.config),
        None if namespaces.is_inactive(nsid) => Err(Status::INVALID_FIELD),
        None => Err(Status::INVALID_NAMESPACE),
    }
}

/// The data that both kinds of controller have in common.
fn any_controller(identity: &Identity, cntlid: u16) -> Controller {
    Controller {
        serial: identity.serial.clone(),
        model: identity.model.clone(),
        firmware: identity.firmware.clone(),
        cntlid,
        version: VERSION_2_0,
        acl: (ABORTS_MAX - 1) as u8,
        aerl: (ASYNC_EVENTS_MAX - 1) as u8,
        kas: (KEEP_ALIVE_STEP_MS / 100) as u16,
        sgls: identify::SGLS_TCP,
        maxcmd: ADMIN_ENTRIES_MAX,
        lpa: identify::LPA_EXTENDED,
        elpe: (ERROR_ENTRIES - 1) as u8,
        ..Controller::default()
    }
}

/// Identify Controller of a controller with I/O queues, with the record of Rio's extension.
fn io_controller_page<E: TargetEnv>(
    context: &Context<E>,
    cntlid: u16,
    env: &mut E,
) -> [u8; identify::LEN] {
    let (identity, extension) =
        env.with_shared(|shared| (shared.identity().clone(), shared.volumes().extension()));
    let mut page = io_controller(&identity, cntlid, &context.namespaces).encode();
    extension.put(&mut page);
    page
}

/// The Identify data of a controller with I/O queues.
fn io_controller(identity: &Identity, cntlid: u16, namespaces: &Namespaces) -> Controller {
    let highest_nsid = namespaces.highest_valid_id();
    let mut page = Controller {
        cmic: CMIC_SEVERAL_CONTROLLERS
            | ana::CMIC_ANA
            | if identity.ports.len() > 1 { ana::CMIC_SEVERAL_PORTS } else { 0 },
        mdts: MDTS,
        oaes: event::CONFIG_NAMESPACE | event::CONFIG_ANA | event::CONFIG_NORMAL_SHUTDOWN,
        anatt: ANA_TRANSITION_S,
        anacap: ana::ANACAP_ALL_STATES | ana::ANACAP_FIXED_GROUPS | ana::ANACAP_GROUP_IDS,
        anagrpmax: ANA_GROUP_MAX,
        nanagrpid: ANA_GROUP_MAX,
        ctratt: identify::CTRATT_HOSTID_128 | identify::CTRATT_TBKAS,
        cntrltype: identify::CNTRLTYPE_IO,
        // One firmware slot, which is read only.
        frmw: 1 << 1 | 1,
        lpa: identify::LPA_SMART_OF_NAMESPACE | identify::LPA_EFFECTS | identify::LPA_EXTENDED,
        // The smallest and the largest size of a queue entry, each as a power of two: 2⁶ bytes for
        // submission, 2⁴ bytes for completion.
        sqes: 0x66,
        cqes: 0x44,
        maxcmd: QUEUE_ENTRIES_MAX,
        nn: highest_nsid,
        mnan: highest_nsid,
        oncs: identify::ONCS_COMPARE
            | identify::ONCS_DSM
            | identify::ONCS_WRITE_ZEROES
            | identify::ONCS_RESERVATIONS
            | identify::ONCS_VERIFY
            | identify::ONCS_COPY,
        ocfs: identify::OCFS_FORMAT_0,
        fuses: identify::FUSES_COMPARE_AND_WRITE,
        // One block: more is not written as a whole (assumption M1).
        acwu: 0,
        vwc: if namespaces.any_volatile() {
            identify::VWC_PRESENT | identify::VWC_FLUSH_ONE
        } else {
            identify::VWC_FLUSH_ONE
        },
        subnqn: identity.subnqn.clone(),
        // A response capsule is one completion entry, in units of 16 bytes.
        iorcsz: 1,
        // A command has one data block descriptor.
        msdbd: 1,
        ofcs: identify::OFCS_DISCONNECT,
        ..any_controller(identity, cntlid)
    };
    page.set_in_capsule_bytes(IN_CAPSULE_BYTES);
    page
}

fn discovery_controller(identity: &Identity, cntlid: u16) -> Controller {
    Controller {
        cntrltype: identify::CNTRLTYPE_DISCOVERY,
        oaes: event::CONFIG_DISCOVERY,
        subnqn: DISCOVERY_NQN.into(),
        ..any_controller(identity, cntlid)
    }
}

/// The Namespace Identification Descriptors of a namespace.
fn namespace_descriptors(config: &NamespaceConfig) -> Descriptors {
    Descriptors {
        nguid: (config.nguid != [0; 16]).then_some(config.nguid),
        uuid: Some(config.uuid),
        csi: Some(identify::CSI_NVM),
        ..Descriptors::default()
    }
}

/// The limits of commands that have no data, or only a list of ranges.
fn limits_of_commands() -> NvmController {
    NvmController {
        vsl: VSL,
        wzsl: WZSL,
        dmrl: DSM_RANGES,
        dmrsl: DSM_RANGE_BLOCKS,
        dmsl: u64::from(DSM_RANGES) * u64::from(DSM_RANGE_BLOCKS),
    }
}

/// The Identify data of a namespace.
fn namespace_page(config: &NamespaceConfig) -> Namespace {
    let per_block = config.lba_size.per_drive_block();
    let blocks = config.blocks * u64::from(per_block);
    let page = Namespace {
        nsze: blocks,
        ncap: blocks,
        nuse: blocks,
        nmic: NMIC_SHARED,
        anagrpid: config.ana_group,
        rescap: RESCAP,
        // Deallocated blocks read as zeroes (trap T10).
        dlfeat: identify::DLFEAT_ZEROES | identify::DLFEAT_DEAC,
        mssrl: (COPY_RANGE_BLOCKS_MAX * per_block) as u16,
        mcl: COPY_BLOCKS_MAX * per_block,
        msrc: (COPY_RANGES_MAX - 1) as u8,
        nguid: config.nguid,
        lbads: config.lba_size.log2(),
        ..Namespace::default()
    };
    if !config.lba_size.is_small() {
        return page;
    }
    // A write within a block of the drive is atomic (assumption M1). What fills such blocks whole is
    // written without a read before it.
    let block = (per_block - 1) as u16;
    Namespace {
        nsfeat: identify::NSFEAT_ATOMICS | identify::NSFEAT_OPTPERF,
        nawun: block,
        nawupf: block,
        nabsn: block,
        nabspf: block,
        npwg: block,
        npwa: block,
        npdg: block,
        npda: block,
        ..page
    }
}

/// The discovery log page: the ports of the subsystem. It is empty for a host that is not `allowed`
/// to use the subsystem.
///
/// A port that listens on all addresses is listed with the address `local_address`, through which
/// the host has connected, because the host can reach that address.
fn discovery_page(
    identity: &Identity,
    generation: u64,
    allowed: bool,
    local_address: Option<&LocalAddress>,
) -> Vec<u8> {
    let ports: Vec<&DiscoveryPort> =
        identity.ports.iter().filter(|port| allowed && !port.discovery_only).collect();
    let header = Header { genctr: generation, numrec: ports.len() as u64, recfmt: 0 };
    let mut page = header.encode().to_vec();
    for port in ports {
        let is_any_address = matches!(port.traddr.as_str(), "0.0.0.0" | "::");
        let (traddr, ipv6) = match local_address.filter(|_| is_any_address) {
            Some(local_address) => (&local_address.traddr, local_address.ipv6),
            None => (&port.traddr, port.ipv6),
        };
        let (secure_channel, sectype) = match port.tls {
            // Without TLS, TREQ has no flag for a secure channel, like in Linux's target. The library of
            // nvme-cli would start TLS even for "not required", and would fail without a key.
            None => (0, discovery::SECTYPE_NONE),
            Some(Demand::Allowed) => (discovery::TREQ_NOT_REQUIRED, discovery::SECTYPE_TLS13),
            Some(Demand::Required) => (discovery::TREQ_REQUIRED, discovery::SECTYPE_TLS13),
        };
        let entry = Entry {
            trtype: discovery::TRTYPE_TCP,
            adrfam: if ipv6 { discovery::ADRFAM_IPV6 } else { discovery::ADRFAM_IPV4 },
            subtype: discovery::SUBTYPE_NVM,
            treq: discovery::TREQ_NO_SQ_FLOW | secure_channel,
            sectype,
            portid: port.portid,
            cntlid: CNTLID_ANY,
            asqsz: 32,
            trsvcid: port.trsvcid.clone(),
            subnqn: identity.subnqn.clone(),
            traddr: traddr.clone(),
        };
        page.extend_from_slice(&entry.encode());
    }
    page
}
