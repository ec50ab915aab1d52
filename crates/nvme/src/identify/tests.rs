//! Identify structures byte by byte; the expected bytes come from the specification.

use super::*;
use std::vec;

/// Places byte strings at offsets of a zeroed page.
fn page(fields: &[(usize, &[u8])]) -> Vec<u8> {
    let mut b = vec![0; LEN];
    for (at, bytes) in fields {
        b[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    b
}

#[test]
fn controller_bytes() {
    let bytes = page(&[
        (0, &[0x86, 0x80]),
        (2, &[0x86, 0x80]),
        (4, b"0123456789abcdef    "),
        (24, b"Rio target                              "),
        (64, b"0.1.0   "),
        (72, &[6]),
        (73, &[0xe4, 0xd2, 0x5c]),
        (76, &[2]),
        (77, &[8]),
        (78, &[0x34, 0x12]),
        (80, &[0, 0, 2, 0]),
        (92, &[0, 1, 0, 0]),
        (96, &[0x41, 0, 0, 0]),
        (111, &[1]),
        (256, &[0, 0]),
        (258, &[3, 7, 3, 6, 63]),
        (320, &[10, 0]),
        (512, &[0x66, 0x44, 0x80, 0x00]),
        (516, &[4, 0, 0, 0]),
        (520, &[0x0d, 0, 1, 0]),
        (525, &[7]),
        (528, &[0, 0]),
        (532, &[3, 0]),
        (536, &[1, 0, 0x10, 0]),
        (540, &[4, 0, 0, 0]),
        (768, b"nqn.2026-01.io.example:drives"),
        // 64 + 32 KiB: 32832 / 16 = 804h
        (1792, &[0x04, 0x08, 0, 0]),
        (1796, &[1, 0, 0, 0]),
        (1803, &[1]),
        (1804, &[1, 0]),
    ]);
    let id = Controller::decode(&bytes).unwrap();
    assert_eq!(id.serial, "0123456789abcdef");
    assert_eq!(id.model, "Rio target");
    assert_eq!(id.firmware, "0.1.0");
    assert_eq!(id.subnqn, "nqn.2026-01.io.example:drives");
    assert_eq!((id.cntlid, id.version, id.cntrltype), (0x1234, 0x20000, CNTRLTYPE_IO));
    assert_eq!(id.ctratt, CTRATT_HOSTID_128 | CTRATT_TBKAS);
    assert_eq!((id.acl, id.aerl, id.frmw, id.lpa, id.elpe), (3, 7, 3, 6, 63));
    assert_eq!(id.lpa, LPA_EFFECTS | LPA_EXTENDED);
    assert_eq!((id.kas, id.maxcmd, id.nn), (10, 128, 4));
    assert_eq!(id.oncs, ONCS_COMPARE | ONCS_DSM | ONCS_WRITE_ZEROES);
    assert_eq!((id.fuses, id.acwu), (FUSES_COMPARE_AND_WRITE, 3));
    assert_eq!(id.vwc, VWC_PRESENT | VWC_FLUSH_ALL);
    assert_eq!((id.sgls, id.ofcs, id.msdbd), (SGLS_TCP, OFCS_DISCONNECT, 1));
    assert_eq!(id.in_capsule_bytes(), 32768);
    assert_eq!(id.mdts_bytes(0), Some(1 << 20));
    assert_eq!(id.encode()[..], bytes[..]);

    let mut again = id.clone();
    again.set_in_capsule_bytes(32768);
    assert_eq!(again, id);
    again.mdts = 0;
    assert_eq!(again.mdts_bytes(0), None);
    again.mdts = 255;
    assert_eq!(again.mdts_bytes(15), Some(1 << 31), "an unreasonable value stays in bounds");
    again.ioccsz = u32::MAX;
    assert_eq!(again.in_capsule_bytes(), u32::MAX - 64);
    again.ioccsz = 0;
    assert_eq!(again.in_capsule_bytes(), 0);
}

#[test]
fn namespace_bytes() {
    let nguid = *b"\x10\x11\x12\x13\x14\x15\x16\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f";
    let bytes = page(&[
        (0, &[0, 0, 4, 0, 0, 0, 0, 0]),
        (8, &[0, 0, 4, 0, 0, 0, 0, 0]),
        (16, &[0, 0, 4, 0, 0, 0, 0, 0]),
        (24, &[0x10]),
        (30, &[1, 0xfe]),
        (33, &[9]),
        (38, &[2, 0]),
        (64, &[1, 0, 1, 0, 2, 0, 3, 0]),
        (74, &[0, 8, 0, 0, 1, 0, 127]),
        (99, &[1]),
        (104, &nguid),
        (120, &[8, 7, 6, 5, 4, 3, 2, 1]),
        (128, &[0, 0, 12, 0]),
    ]);
    let id = Namespace::decode(&bytes).unwrap();
    assert_eq!((id.nsze, id.ncap, id.nuse), (0x40000, 0x40000, 0x40000));
    assert_eq!(id.block_size(), Some(4096));
    assert_eq!((id.nsfeat, id.dlfeat), (NSFEAT_OPTPERF, DLFEAT_ZEROES | DLFEAT_DEAC));
    assert_eq!((id.npwg, id.npwa, id.npdg, id.npda), (1, 1, 2, 3));
    assert_eq!((id.nmic, id.nsattr, id.nguid), (1, 1, nguid));
    assert_eq!((id.rescap, id.nacwu), (0xfe, 2));
    assert_eq!((id.mssrl, id.mcl, id.msrc), (2048, 65536, 127));
    assert_eq!(id.encode()[..], bytes[..]);

    // Format 17: FLBAS has bit 0 in 3:0 and bit 4 in 6:5.
    let other = page(&[(0, &[8]), (26, &[0x21]), (128 + 4 * 17, &[8, 0, 9, 0])]);
    let id = Namespace::decode(&other).unwrap();
    assert_eq!((id.block_size(), id.metadata), (Some(512), 8));
    // The last possible format is still inside the structure.
    let last = page(&[(26, &[0x6f]), (128 + 4 * 63, &[0, 0, 8, 0])]);
    assert_eq!(Namespace::decode(&last).unwrap().block_size(), None, "256 bytes are no block");
}

#[test]
fn lists() {
    let list = namespace_list([1, 2, 7, 300], 1);
    assert_eq!(list[..], page(&[(0, &[2, 0, 0, 0, 7, 0, 0, 0, 0x2c, 1, 0, 0])])[..]);
    assert_eq!(namespaces_of(&list).unwrap(), [2, 7, 300]);
    let full = namespace_list(1..5000, 10);
    assert_eq!(namespaces_of(&full).unwrap().len(), 1024);
    assert_eq!(namespaces_of(&page(&[(0, &[5, 0, 0, 0, 5, 0, 0, 0])])).unwrap(), [5]);
    assert_eq!(controller_list([1, 2, 9], 2)[..], page(&[(0, &[2, 0, 2, 0, 9, 0])])[..]);
}

#[test]
fn descriptor_bytes() {
    let uuid = *b"\xa0\xa1\xa2\xa3\xa4\xa5\xa6\xa7\xa8\xa9\xaa\xab\xac\xad\xae\xaf";
    let nguid = [0x11; 16];
    let bytes = page(&[
        (0, &[2, 16, 0, 0]),
        (4, &nguid),
        (20, &[3, 16, 0, 0]),
        (24, &uuid),
        (40, &[4, 1, 0, 0, 0]),
    ]);
    let want =
        Descriptors { eui64: None, nguid: Some(nguid), uuid: Some(uuid), csi: Some(CSI_NVM) };
    assert_eq!(Descriptors::decode(&bytes).unwrap(), want);
    assert_eq!(want.encode()[..], bytes[..]);

    // An unknown type is skipped, a wrong length of a known one too.
    let odd =
        page(&[(0, &[9, 3, 0, 0, 1, 2, 3, 3, 4, 0, 0, 1, 2, 3, 4, 1, 8, 0, 0]), (19, &[7; 8])]);
    let found = Descriptors::decode(&odd).unwrap();
    assert_eq!(found, Descriptors { eui64: Some([7; 8]), ..Descriptors::default() });
    // T18: a length that goes beyond the end.
    assert_eq!(Descriptors::decode(&[255; LEN]).unwrap(), Descriptors::default());
    assert!(Descriptors::decode(&[0; 100]).is_err());
}

#[test]
fn command_set_structures() {
    let bytes = page(&[(0, &[7, 9]), (3, &[255, 0, 0, 1, 0]), (8, &[0, 0, 0, 2])]);
    let id = NvmController::decode(&bytes).unwrap();
    assert_eq!(id, NvmController { vsl: 7, wzsl: 9, dmrl: 255, dmrsl: 0x10000, dmsl: 2 << 24 });
    assert_eq!(id.encode()[..], bytes[..]);
    assert_eq!(
        common_namespace(0x10, 1, 0xfe, 0x0302, 0)[..],
        page(&[(0, &[0x10, 1, 0xfe, 0, 2, 3]), (14, &[1])])[..]
    );
    assert_eq!(command_sets()[..], page(&[(0, &[1])])[..]);
}
