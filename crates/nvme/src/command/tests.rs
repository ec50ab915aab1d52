//! Queue entries byte by byte; the expected bytes come from the specification.

use super::*;

/// 64 bytes with byte strings placed at offsets.
fn entry(fields: &[(usize, &[u8])]) -> [u8; 64] {
    let mut b = [0; 64];
    for (at, bytes) in fields {
        b[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    b
}

#[test]
fn io_commands() {
    let mut sqe = Sqe::write(0x0102_0304, 0x1122_3344_5566_7788, 65536);
    assert_eq!(
        sqe.0,
        entry(&[
            (0, &[0x01]),
            (4, &[4, 3, 2, 1]),
            (40, &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]),
            (48, &[0xff, 0xff]),
        ])
    );
    assert_eq!((sqe.slba(), sqe.nlb(), sqe.nsid()), (0x1122_3344_5566_7788, 65536, 0x0102_0304));
    assert!(!sqe.fua());
    sqe.set_fua(true);
    assert_eq!(sqe.0[51], 0x40);
    assert!(sqe.fua());
    sqe.set_cid(0xbeef);
    assert_eq!(sqe.0[..4], [0x01, 0, 0xef, 0xbe]);

    assert_eq!(Sqe::read(1, 2, 3).0, entry(&[(0, &[2]), (4, &[1]), (40, &[2]), (48, &[2])]));
    assert_eq!(Sqe::flush(7).0, entry(&[(4, &[7])]));
    let zeroes = Sqe::write_zeroes(1, 2, 1, true);
    assert_eq!(zeroes.0, entry(&[(0, &[8]), (4, &[1]), (40, &[2]), (51, &[2])]));
    assert!(zeroes.deac());
    let dsm = Sqe::dsm_deallocate(1, 256);
    assert_eq!(dsm.0, entry(&[(0, &[9]), (4, &[1]), (40, &[255]), (44, &[4])]));
    assert!(dsm.dsm_deallocates());
    assert_eq!(dsm.dsm_ranges(), 256);
    let range = DsmRange { lba: 0x1_0000_0000, blocks: 8 };
    assert_eq!(range.encode(), [0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(DsmRange::decode(&range.encode()), range);
}

#[test]
fn admin_commands() {
    let id = Sqe::identify(0x02, 9);
    assert_eq!(id.0, entry(&[(0, &[6]), (4, &[9]), (40, &[2])]));
    assert_eq!((id.cns(), id.identify_csi(), id.identify_cntid()), (2, 0, 0));
    let set = Sqe::set_features(0x07, 0x0003_0004);
    assert_eq!(set.0, entry(&[(0, &[9]), (40, &[7]), (44, &[4, 0, 3, 0])]));
    assert_eq!((set.fid(), set.feature_save(), set.dword(11)), (7, false, 0x0003_0004));
    assert_eq!(Sqe::get_features(0x0f).0, entry(&[(0, &[10]), (40, &[15])]));

    // 1 MiB of page 70h from byte 1024: 3FFFFh dwords less one in NUMDU:NUMDL.
    let log = Sqe::get_log_page(0x70, 0, 1024, 1 << 20);
    let want = entry(&[(0, &[2]), (40, &[0x70, 0, 0xff, 0xff, 3]), (48, &[0, 4])]);
    assert_eq!(log.0, want);
    assert_eq!((log.lid(), log.log_len(), log.log_offset()), (0x70, 1 << 20, 1024));
    let mut all = log;
    all.set_dword(10, 0xffff_8002);
    all.set_dword(11, 0x0000_ffff);
    assert!(all.log_retain());
    assert_eq!(all.log_len(), 1 << 34, "the largest length does not overflow");

    assert_eq!(Sqe::keep_alive().0, entry(&[(0, &[0x18])]));
    assert_eq!(Sqe::async_event().0, entry(&[(0, &[0x0c])]));
    let abort = Sqe::abort(1, 0x1234);
    assert_eq!(abort.0, entry(&[(0, &[8]), (40, &[1, 0, 0x34, 0x12])]));
    assert_eq!(abort.abort_target(), AbortTarget { sqid: 1, cid: 0x1234 });
}

#[test]
fn data_pointers() {
    let mut sqe = Sqe::write(1, 0, 1);
    sqe.set_sgl(Sgl::InCapsule { offset: 0, len: 4096 });
    let want: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x01];
    assert_eq!(sqe.0[24..40], want);
    assert_eq!(sqe.0[1], 0x40, "PSDT 01b");
    assert_eq!(sqe.sgl(), Ok(Sgl::InCapsule { offset: 0, len: 4096 }));
    sqe.set_sgl(Sgl::Transport { len: 65536 });
    let want: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0x5a];
    assert_eq!(sqe.0[24..40], want);
    assert_eq!(sqe.sgl().map(Sgl::len), Ok(65536));

    // T18: a keyed descriptor, a segment descriptor, an address in host memory.
    for kind in [0x40, 0x20, 0x00, 0x5b, 0xff] {
        sqe.0[39] = kind;
        assert_eq!(sqe.sgl(), Err(SglError(kind)));
    }
    assert_eq!(SglError(0).status(), Status::SGL_TYPE_INVALID.with_dnr());
}

#[test]
fn completions() {
    let cqe = Cqe::new(0x1234, 5, 2, Status::WRITE_FAULT.with_dnr(), 0x1122_3344_5566_7788);
    let want: [u8; 16] =
        [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 5, 0, 2, 0, 0x34, 0x12, 0x00, 0x85];
    assert_eq!(cqe.0, want);
    assert_eq!((cqe.cid(), cqe.sqhd(), cqe.sqid()), (0x1234, 5, 2));
    assert_eq!(cqe.result(), 0x1122_3344_5566_7788);
    assert!(cqe.status().is(Status::WRITE_FAULT) && cqe.status().dnr());
    // The phase tag is not part of the status.
    let mut tagged = cqe;
    tagged.0[14] |= 1;
    assert_eq!(tagged.status(), cqe.status());
}
