//! The answers to Identify and Get Log Page with the id of a namespace that does not exist.

mod world;

use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::{NamespaceConfig, Namespaces, Shared, Volumes};
use riopipe_testkit::peer;
use world::{BLOCKS, NOW, World, crc, identity};

const INVALID_FIELD: u16 = 0x02;
const INVALID_NAMESPACE: u16 = 0x0b;
/// The log page SMART / Health Information.
const SMART: u8 = 0x02;

/// A target with namespaces of these ids.
fn with_namespaces(ids: &[u32]) -> World {
    let mut w = World::new(&vec![false; ids.len()]);
    let configs = ids.iter().map(|nsid| NamespaceConfig {
        nsid: *nsid,
        blocks: BLOCKS,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [*nsid as u8; 16],
        uuid: [0x10 + *nsid as u8; 16],
        volatile: false,
        order: DriveOrder::None,
    });
    let namespaces = Namespaces::new(configs.collect()).unwrap();
    w.host.shared = Shared::new(identity(), namespaces, Volumes::without_log(crc), NOW);
    w
}

/// CNS values that take the id of one namespace.
const OF_ONE_NAMESPACE: [u8; 6] = [0x00, 0x03, 0x05, 0x08, 0x11, 0x12];

/// Ids that are not valid: 0, and all above NN (Base §3.2.1.2).
#[test]
fn an_invalid_id_gets_the_same_status_from_every_structure() {
    let mut w = with_namespaces(&[1, 3]);
    let (at, _) = w.admin();
    for cns in OF_ONE_NAMESPACE {
        for nsid in [1, 3] {
            assert_eq!(w.fetch(at, peer::identify(1, cns, nsid)).1.status, 0, "{cns:#x}, {nsid}");
        }
        for nsid in [0, 4, 1024, 0xffff_fffe, 0xffff_ffff] {
            let status = w.call(at, peer::identify(1, cns, nsid), &[]).status;
            // Base §5.17.2.11 has another status for the id of all namespaces.
            let is_list_of_all = cns == 0x12 && nsid == 0xffff_ffff;
            let expected = if is_list_of_all { INVALID_FIELD } else { INVALID_NAMESPACE };
            assert_eq!(status, expected, "CNS {cns:#x}, namespace {nsid:#x}");
        }
    }
    // Lists of namespaces take the id after which they begin.
    for cns in [0x02, 0x07, 0x10] {
        assert_eq!(w.fetch(at, peer::identify(1, cns, 4)).0, [0; 4096], "CNS {cns:#x}");
        for nsid in [0xffff_fffe, 0xffff_ffff] {
            assert_eq!(w.call(at, peer::identify(1, cns, nsid), &[]).status, INVALID_NAMESPACE);
        }
    }
}

/// Namespace 2 does not exist, and its id is below that of namespace 3.
#[test]
fn an_inactive_id_gets_zeroes_where_the_standard_demands_them() {
    let mut w = with_namespaces(&[1, 3]);
    let (at, _) = w.admin();
    let (id, _) = w.fetch(at, peer::identify(1, 0x01, 0));
    assert_eq!(id[516..520], [3, 0, 0, 0], "NN");
    for cns in [0x00, 0x05, 0x08, 0x11] {
        let (page, done) = w.fetch(at, peer::identify(1, cns, 2));
        assert_eq!((page, done.status), (vec![0; 4096], 0), "CNS {cns:#x}");
    }
    for cns in [0x03, 0x12] {
        let done = w.call(at, peer::identify(1, cns, 2), &[]);
        assert_eq!((done.status, done.dnr), (INVALID_FIELD, true), "CNS {cns:#x}");
    }
}

#[test]
fn a_target_without_namespaces_has_one_valid_id() {
    let mut w = with_namespaces(&[]);
    let (at, _) = w.admin();
    assert_eq!(w.fetch(at, peer::identify(1, 0x01, 0)).0[516..520], [1, 0, 0, 0], "NN");
    assert_eq!(w.fetch(at, peer::identify(1, 0x00, 1)).0, [0; 4096]);
    assert_eq!(w.call(at, peer::identify(1, 0x00, 2), &[]).status, INVALID_NAMESPACE);
}

#[test]
fn log_pages_take_a_namespace_id_only_where_they_are_of_a_namespace() {
    let mut w = with_namespaces(&[1, 3]);
    let (at, _) = w.admin();
    let get = |lid: u8, nsid: u32| peer::get_log(1, lid, 0, 64).dword(1, nsid);
    for lid in 0..=5 {
        for all in [0, 0xffff_ffff] {
            assert_eq!(w.fetch(at, get(lid, all)).1.status, 0, "{lid:#x}");
        }
    }
    let of_controller = w.fetch(at, get(SMART, 0)).0;
    for nsid in [1, 3] {
        assert_eq!(w.fetch(at, get(SMART, nsid)).0, of_controller, "namespace {nsid}");
    }
    assert_eq!(w.call(at, get(SMART, 2), &[]).status, INVALID_FIELD, "an inactive id");
    for nsid in [4, 77, 0xffff_fffe] {
        assert_eq!(w.call(at, get(SMART, nsid), &[]).status, INVALID_NAMESPACE, "{nsid:#x}");
    }
    for lid in [0x00, 0x01, 0x03, 0x04, 0x05] {
        for nsid in [1, 2, 77] {
            assert_eq!(w.call(at, get(lid, nsid), &[]).status, INVALID_FIELD, "{lid:#x}, {nsid}");
        }
    }
    assert_eq!(w.call(at, get(0x70, 77), &[]).status, 0x109, "it has no such page");
}
