//! Identify and log pages: the description of the subsystem, its namespaces and its ports for a
//! host.

use alloc::vec::Vec;

use riopipe_nvme::command::{Sqe, Status};
use riopipe_nvme::discovery::{self, Entry, Header};
use riopipe_nvme::fabrics::{CNTLID_ANY, DISCOVERY_NQN, VERSION_2_0};
use riopipe_nvme::identify::{self, Controller, Descriptors, Namespace, NvmController, cns};
use riopipe_nvme::log_page;

use super::Admin;
use crate::outbox::Outbox;
use crate::target::closed::Closed;
use crate::target::context::Context;
use crate::target::env::TargetEnv;
use crate::target::identity::{DiscoveryPort, Identity, LocalAddress};
use crate::target::limits::{
    ADMIN_ENTRIES_MAX, ASYNC_EVENTS_MAX, IN_CAPSULE_BYTES, KEEP_ALIVE_STEP_MS, MDTS,
    QUEUE_ENTRIES_MAX, TRANSFER_BYTES_MAX,
};
use crate::target::namespace::{NSID_MAX, NamespaceConfig};

/// NMIC bit 0: several controllers may have the namespace.
const SHARED_NAMESPACE: u8 = 1;
/// CMIC bit 1: the subsystem has several controllers.
const SEVERAL_CONTROLLERS: u8 = 1 << 1;
/// 300 K: a target has no thermometer, and hosts print a temperature of 0 as −273 °C.
const TEMPERATURE: u16 = 300;

impl Admin {
    /// Identify.
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
        if self.discovery {
            return match sqe.cns() {
                cns::CONTROLLER => {
                    let identity = env.with_shared(|shared| shared.identity().clone());
                    Ok(discovery_controller(&identity, queue.cntlid).encode())
                }
                _ => Err(Status::INVALID_FIELD),
            };
        }
        let namespace = || -> Result<&NamespaceConfig, Status> {
            let (_, namespace) = context.namespaces.find(nsid).ok_or(Status::INVALID_NAMESPACE)?;
            Ok(&namespace.config)
        };
        // An id that could be a namespace, but is none. The structure is all zeroes.
        let inactive = (1..=NSID_MAX).contains(&nsid) && context.namespaces.find(nsid).is_none();
        let after = || match nsid {
            0xffff_fffe.. => Err(Status::INVALID_NAMESPACE),
            nsid => Ok(nsid),
        };
        match (sqe.cns(), sqe.identify_csi()) {
            (cns::NAMESPACE | cns::ALLOCATED_NAMESPACE, _) if inactive => Ok([0; identify::LEN]),
            (cns::NAMESPACE | cns::ALLOCATED_NAMESPACE, _) => {
                Ok(namespace_page(namespace()?).encode())
            }
            (cns::CONTROLLER, _) => {
                let volatile = context.namespaces.any_volatile();
                let highest = context.namespaces.highest_id();
                let (identity, extension) = env.with_shared(|shared| {
                    (shared.identity().clone(), shared.volumes().extension())
                });
                let page = io_controller(&identity, queue.cntlid, highest, volatile);
                let mut page = page.encode();
                extension.put(&mut page);
                Ok(page)
            }
            (cns::ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES, _)
            | (cns::COMMAND_SET_ACTIVE_NAMESPACES, identify::CSI_NVM) => {
                Ok(identify::namespace_list(context.namespaces.ids(), after()?))
            }
            (cns::NAMESPACE_DESCRIPTORS, _) => {
                let config = namespace()?;
                let descriptors = Descriptors {
                    nguid: (config.nguid != [0; 16]).then_some(config.nguid),
                    uuid: Some(config.uuid),
                    csi: Some(identify::CSI_NVM),
                    ..Descriptors::default()
                };
                Ok(descriptors.encode())
            }
            (cns::COMMAND_SET_NAMESPACE, identify::CSI_NVM) => {
                namespace()?;
                Ok(identify::nvm_namespace())
            }
            (cns::COMMAND_SET_CONTROLLER, identify::CSI_NVM) => {
                Ok(NvmController::default().encode())
            }
            (cns::COMMON_NAMESPACE, _) if inactive => Ok([0; identify::LEN]),
            (cns::COMMON_NAMESPACE, _) => {
                namespace()?;
                Ok(identify::common_namespace(0, SHARED_NAMESPACE, 0))
            }
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

    /// Get Log Page.
    pub(super) fn log_page<E: TargetEnv>(
        &self,
        context: &mut Context<E>,
        sqe: &Sqe,
        env: &mut E,
        outbox: &mut Outbox<E::Buf>,
    ) -> Result<(), Closed> {
        let cid = sqe.cid();
        let len = sqe.log_len();
        if len > u64::from(TRANSFER_BYTES_MAX) || !sqe.log_offset().is_multiple_of(4) {
            context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox);
            return Ok(());
        }
        let Some(page) = self.whole_log_page(context, sqe.lid(), env) else {
            context.send_completion(cid, Status::INVALID_LOG_PAGE.with_dnr(), 0, outbox);
            return Ok(());
        };
        match log_page::slice(&page, sqe.log_offset(), len as u32) {
            Ok(part) => context.send_page(sqe, &part, outbox),
            Err(_) => context.send_completion(cid, Status::INVALID_FIELD.with_dnr(), 0, outbox),
        }
        Ok(())
    }

    /// The whole content of a log page; `None` if the controller does not have that page.
    fn whole_log_page<E: TargetEnv>(
        &self,
        context: &Context<E>,
        lid: u8,
        env: &mut E,
    ) -> Option<Vec<u8>> {
        let discovery = self.discovery;
        Some(match lid {
            log_page::SUPPORTED if discovery => {
                log_page::supported(&[log_page::SUPPORTED, log_page::DISCOVERY]).to_vec()
            }
            log_page::DISCOVERY if discovery => {
                let hostnqn = context.queue.as_ref().map_or("", |q| &q.hostnqn);
                let (identity, generation, allowed) = env.with_shared(|shared| {
                    (
                        shared.identity().clone(),
                        shared.discovery_generation(),
                        shared.allows(hostnqn),
                    )
                });
                discovery_page(&identity, generation, allowed, self.local.as_ref())
            }
            _ if discovery => return None,
            log_page::SUPPORTED => log_page::supported(&[
                log_page::SUPPORTED,
                log_page::ERROR,
                log_page::SMART,
                log_page::FIRMWARE,
                log_page::CHANGED_NAMESPACES,
                log_page::EFFECTS,
            ])
            .to_vec(),
            // No entries are kept. Each command's own status reports its error.
            log_page::ERROR => alloc::vec![0; log_page::ErrorEntry::LEN],
            log_page::SMART => log_page::Smart {
                temperature: TEMPERATURE,
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
            log_page::CHANGED_NAMESPACES => log_page::changed_namespaces(&[]).to_vec(),
            log_page::EFFECTS => log_page::effects(true).to_vec(),
            _ => return None,
        })
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
        aerl: (ASYNC_EVENTS_MAX - 1) as u8,
        kas: (KEEP_ALIVE_STEP_MS / 100) as u16,
        sgls: identify::SGLS_TCP,
        maxcmd: ADMIN_ENTRIES_MAX,
        lpa: identify::LPA_EXTENDED,
        ..Controller::default()
    }
}

/// The Identify data of a controller with I/O queues. `highest`: the largest namespace identifier.
fn io_controller(identity: &Identity, cntlid: u16, highest: u32, volatile: bool) -> Controller {
    let mut page = Controller {
        cmic: SEVERAL_CONTROLLERS,
        mdts: MDTS,
        ctratt: identify::CTRATT_HOSTID_128 | identify::CTRATT_TBKAS,
        cntrltype: identify::CNTRLTYPE_IO,
        // One firmware slot, which is read only.
        frmw: 1 << 1 | 1,
        lpa: identify::LPA_EFFECTS | identify::LPA_EXTENDED,
        // The sizes of queue entries as powers of two, both the least and the greatest: 64 bytes
        // for submission, 16 bytes for completion.
        sqes: 0x66,
        cqes: 0x44,
        maxcmd: QUEUE_ENTRIES_MAX,
        nn: highest.max(1),
        mnan: highest.max(1),
        oncs: identify::ONCS_DSM | identify::ONCS_WRITE_ZEROES,
        vwc: if volatile {
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
        subnqn: DISCOVERY_NQN.into(),
        ..any_controller(identity, cntlid)
    }
}

/// The Identify data of a namespace.
fn namespace_page(config: &NamespaceConfig) -> Namespace {
    Namespace {
        nsze: config.blocks,
        ncap: config.blocks,
        nuse: config.blocks,
        nmic: SHARED_NAMESPACE,
        // T10: deallocated blocks read as zeroes.
        dlfeat: identify::DLFEAT_ZEROES | identify::DLFEAT_DEAC,
        nguid: config.nguid,
        // Blocks of 2¹² bytes.
        lbads: 12,
        ..Namespace::default()
    }
}

/// The discovery log: every port of the subsystem, for hosts that may use it. A port that listens
/// on all addresses is listed with the address through which the host connected, since the host can
/// reach that one.
fn discovery_page(
    identity: &Identity,
    generation: u64,
    allowed: bool,
    local: Option<&LocalAddress>,
) -> Vec<u8> {
    let ports: Vec<&DiscoveryPort> =
        identity.ports.iter().filter(|port| allowed && !port.discovery_only).collect();
    let header = Header { genctr: generation, numrec: ports.len() as u64, recfmt: 0 };
    let mut page = header.encode().to_vec();
    for port in ports {
        let is_any_address = matches!(port.traddr.as_str(), "0.0.0.0" | "::");
        let (traddr, ipv6) = match local.filter(|_| is_any_address) {
            Some(local) => (&local.traddr, local.ipv6),
            None => (&port.traddr, port.ipv6),
        };
        let entry = Entry {
            trtype: discovery::TRTYPE_TCP,
            adrfam: if ipv6 { discovery::ADRFAM_IPV6 } else { discovery::ADRFAM_IPV4 },
            subtype: discovery::SUBTYPE_NVM,
            // Nothing about a secure channel, as in Linux's target. For nvme-cli's library even
            // "not required" is a reason to start TLS, and it fails without a key.
            treq: discovery::TREQ_NO_SQ_FLOW,
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
