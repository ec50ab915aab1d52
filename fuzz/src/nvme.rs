//! Decoders of `riopipe-nvme`. Each function returns whether the input was accepted.

use riopipe_nvme::command::{Cqe, DsmRange, Sqe};
use riopipe_nvme::digest::soft;
use riopipe_nvme::fabrics::{Cap, Cc, ConnectData, Csts};
use riopipe_nvme::pdu::{Fes, Pdu, Role, Rx, TERM_LEN, TERM_MAX};
use riopipe_nvme::{discovery, identify, log_page};

/// PDU parsing: the first byte chooses the receiver, the rest is the received bytes.
pub fn pdu(data: &[u8]) -> bool {
    let Some((&bits, bytes)) = data.split_first() else { return false };
    let rx = Rx {
        role: if bits & 1 == 0 { Role::Host } else { Role::Controller },
        connected: bits & 6 != 0,
        header_digest: bits & 8 != 0,
        data_digest: bits & 16 != 0,
        align: 4 << (bits >> 5 & 3),
        capsule_max: 4096,
        data_max: 8192,
        crc: soft,
    };
    match rx.parse(bytes) {
        Ok(Some(parsed)) => {
            assert!(parsed.len >= 24 && parsed.len <= bytes.len());
            assert!(parsed.data.start <= parsed.data.end && parsed.data.end <= parsed.len);
            assert!(parsed.data.is_empty() || parsed.data.start >= 24);
            match parsed.pdu {
                Pdu::H2cData(h) | Pdu::C2hData(h) => {
                    assert_eq!(h.datal as usize, parsed.data.len());
                    assert!(h.datao.checked_add(h.datal).is_some());
                    assert!(h.datal <= rx.data_max);
                    assert!(!h.success || h.last);
                }
                Pdu::CapsuleCmd { .. } => assert!(parsed.data.len() <= rx.capsule_max as usize),
                _ => {}
            }
            // Bytes after a PDU do not change the result.
            assert_eq!(rx.parse(&bytes[..parsed.len]).unwrap().unwrap(), parsed);
            true
        }
        Ok(None) => {
            let need = rx.need(bytes);
            assert!(need > bytes.len(), "it would wait for ever");
            let most = 128 + rx.capsule_max.max(rx.data_max) as usize + 4;
            assert!(need <= most, "it would buffer {need} bytes");
            false
        }
        Err(e) => {
            assert!(e.fei < 128 || e.fes == Fes::HeaderDigest);
            let mut out = Vec::new();
            e.term_req().encode(Role::Host, bytes, &mut out);
            if matches!(bytes[0], 2 | 3) {
                assert!(out.is_empty(), "a termination request is never answered");
            } else {
                assert!(out.len() <= TERM_MAX && out.len() >= TERM_LEN);
            }
            false
        }
    }
}

/// Submission queue entries: every accessor on every pattern.
pub fn command(data: &[u8]) -> bool {
    let mut bytes = [0; 64];
    let n = data.len().min(64);
    bytes[..n].copy_from_slice(&data[..n]);
    let mut sqe = Sqe(bytes);
    assert!((1..=65536).contains(&sqe.nlb()));
    assert!(sqe.log_len() >= 4 && sqe.log_len().is_multiple_of(4));
    assert!((1..=256).contains(&sqe.dsm_ranges()));
    assert!(matches!(sqe.property_size(), None | Some(4 | 8)));
    let _ = (sqe.opcode(), sqe.fuse(), sqe.cid(), sqe.nsid(), sqe.slba(), sqe.fua(), sqe.deac());
    let _ = (sqe.prinfo(), sqe.cns(), sqe.identify_cntid(), sqe.identify_csi(), sqe.fid());
    let _ = (sqe.feature_select(), sqe.feature_save(), sqe.lid(), sqe.log_retain());
    let _ = (sqe.log_offset(), sqe.abort_target(), sqe.fctype(), sqe.dsm_deallocates());
    let _ = (sqe.property_offset(), sqe.property_value(), format!("{sqe:?}"));
    let connect = sqe.connect_fields();
    assert_eq!(Sqe::connect(&connect).connect_fields(), connect);
    let cap = Cap::from_value(sqe.property_value());
    assert_eq!(Cap::from_value(cap.value()), cap);
    let _ = (Cc(sqe.dword(12)).shutdown(), Csts(sqe.dword(12)).shutdown_done());
    let cqe = Cqe(*bytes.first_chunk().unwrap());
    let again = Cqe::new(cqe.cid(), cqe.sqhd(), cqe.sqid(), cqe.status(), cqe.result());
    assert_eq!((again.status(), again.result()), (cqe.status(), cqe.result()));
    let _ = format!("{cqe:?} {}", cqe.status());
    let range = DsmRange::decode(bytes.first_chunk().unwrap());
    assert_eq!(DsmRange::decode(&range.encode()), range);

    let sgl = sqe.sgl();
    if let Ok(sgl) = sgl {
        sqe.set_sgl(sgl);
        assert_eq!(sqe.sgl(), Ok(sgl));
    }
    sgl.is_ok()
}

/// Identify, discovery, log page and connect structures: for any bytes,
/// decoding, encoding and decoding again gives the same value.
pub fn structures(data: &[u8]) -> bool {
    let mut page = vec![0; 4096];
    let n = data.len().min(4096);
    page[..n].copy_from_slice(&data[..n]);

    // Text is cleaned and NQNs are cut on the way, so the first trip may change it.
    let controller = identify::Controller::decode(&page).unwrap();
    let once = identify::Controller::decode(&controller.encode()).unwrap();
    assert_eq!(identify::Controller::decode(&once.encode()).unwrap(), once);
    for mpsmin in [0, 15] {
        assert!(controller.mdts_bytes(mpsmin) != Some(0));
    }
    let _ = controller.in_capsule_bytes();
    for text in [&controller.serial, &controller.model, &controller.subnqn] {
        assert!(text.bytes().all(|c| (0x20..0x7f).contains(&c)), "nothing plays with a terminal");
    }

    let namespace = identify::Namespace::decode(&page).unwrap();
    assert_eq!(identify::Namespace::decode(&namespace.encode()).unwrap(), namespace);
    let _ = namespace.block_size();
    let nsids = identify::namespaces_of(&page).unwrap();
    assert!(nsids.is_sorted() && nsids.len() <= 1024);
    assert_eq!(identify::namespaces_of(&identify::namespace_list(nsids.clone(), 0)), Ok(nsids));
    let names = identify::Descriptors::decode(&page).unwrap();
    assert_eq!(identify::Descriptors::decode(&names.encode()).unwrap(), names);
    let nvm = identify::NvmController::decode(&page).unwrap();
    assert_eq!(identify::NvmController::decode(&nvm.encode()).unwrap(), nvm);

    let header = discovery::Header::decode(&page).unwrap();
    assert_eq!(discovery::Header::decode(&header.encode()).unwrap(), header);
    let entry = discovery::Entry::decode(&page).unwrap();
    let once = discovery::Entry::decode(&entry.encode()).unwrap();
    assert_eq!(discovery::Entry::decode(&once.encode()).unwrap(), once);

    let error = log_page::ErrorEntry::decode(&page).unwrap();
    assert_eq!(log_page::ErrorEntry::decode(&error.encode()).unwrap(), error);
    let smart = log_page::Smart::decode(&page).unwrap();
    assert_eq!(log_page::Smart::decode(&smart.encode()).unwrap(), smart);
    let _ = log_page::changed_namespaces_of(&page).unwrap();

    match ConnectData::decode(data) {
        Ok(connect) => {
            assert_eq!(ConnectData::decode(&connect.encode()).as_ref(), Ok(&connect));
            true
        }
        Err(e) => {
            assert!(matches!(e.offset, 0 | 256 | 512));
            false
        }
    }
}
