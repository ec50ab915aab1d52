//! The limits of commands that have no data, or only a list of ranges.

mod world;

use riopipe_order::write_order::DriveOrder;
use riopipe_session::target::limits::DSM_RANGE_BLOCKS;
use riopipe_session::target::{NamespaceConfig, Namespaces, Shared, Volumes};
use riopipe_testkit::peer::{self, Sqe};
use world::{What, World, crc, identity};

/// Blocks of a drive of 16 TiB.
const LARGE: u64 = 1 << 32;

/// A host with a queue to a large drive.
fn large() -> (World, usize, usize) {
    let mut w = World::new(&[false]);
    let config = NamespaceConfig {
        nsid: 1,
        blocks: LARGE,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [1; 16],
        uuid: [1; 16],
        volatile: false,
        order: DriveOrder::None,
    };
    let namespaces = Namespaces::new(vec![config]).unwrap();
    w.host.shared = Shared::new(identity(), namespaces, Volumes::without_log(crc), world::NOW);
    let (admin, cntlid) = w.admin();
    let io = w.io(cntlid, 1);
    w.host.drives[0].holds = true;
    (w, admin, io)
}

fn deallocate(ranges: &[(u64, u32)]) -> (Sqe, Vec<u8>) {
    let mut list = Vec::new();
    for (lba, count) in ranges {
        list.extend([0; 4]);
        list.extend(count.to_le_bytes());
        list.extend(lba.to_le_bytes());
    }
    let sqe = Sqe::new(0x09, 1, 1).dword(10, ranges.len() as u32 - 1).dword(11, 4);
    (sqe.inline(list.len() as u32), list)
}

fn pending(w: &World) -> Vec<(u64, u64)> {
    let range = |operation: &world::Pending| match operation.what {
        What::Zero { blocks, deallocate: true } => (operation.lba, blocks),
        ref other => panic!("{other:?}"),
    };
    w.host.drives[0].pending.iter().map(range).collect()
}

#[test]
fn the_limits_are_announced() {
    let (mut w, admin, _) = large();
    let page = w.fetch(admin, peer::identify(1, 0x06, 0)).0;
    assert_eq!(
        page[..16],
        [
            11, 16, 0, 255, // VSL, WZSL, WUSL, DMRL
            0, 0, 4, 0, // DMRSL: 2¹⁸ blocks
            0, 0, 0xfc, 3, 0, 0, 0, 0, // DMSL: 255 times as many
        ]
    );
}

#[test]
fn a_long_range_is_deallocated_in_pieces() {
    let (mut w, _, io) = large();
    let most = u64::from(DSM_RANGE_BLOCKS);
    let (sqe, list) = deallocate(&[(5, 2 * DSM_RANGE_BLOCKS + 1), (0, 0), (1 << 31, 1), (7, 0)]);
    w.command(io, sqe, &list);
    for piece in [(5, most), (5 + most, most), (5 + 2 * most, 1), (1 << 31, 1)] {
        assert_eq!(pending(&w), [piece]);
        w.complete(0, 0);
    }
    assert_eq!(w.completions(io)[0].status, 0);
    // 256 ranges, more than are announced.
    let (sqe, list) = deallocate(&[(9, 1); 256]);
    w.command(io, sqe, &list);
    for _ in 0..256 {
        w.complete(0, 0);
    }
    assert_eq!(w.completions(io)[0].status, 0);
    assert!(w.links[io].conn.is_quiet());
}

/// Only the piece that is at the drive keeps a claim waiting.
#[test]
fn t21_each_piece_passes_the_guard() {
    let mut w = World::new(&[false]);
    let (_, cntlid) = w.admin_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], 0);
    let io = w.io_as("nqn.2014-08.org.nvmexpress:uuid:other", [9; 16], cntlid, 1);
    w.host.drives[0].holds = true;
    let (sqe, list) = deallocate(&[(0, 10), (20, 10)]);
    w.command(io, sqe, &list);
    let (admin, _) = w.admin();
    let claim = w.first_claim();
    assert_eq!(w.claim(admin, &claim), None);
    w.complete(0, 0);
    assert_eq!(w.completions(admin)[0].status, 0);
    let guarded = riopipe_session::wire::status::GUARDED.code();
    assert_eq!(w.completions(io)[0].status, guarded);
}

#[test]
fn write_zeroes_covers_as_many_blocks_as_it_can_name() {
    let (mut w, _, io) = large();
    w.host.drives[0].holds = false;
    assert_eq!(w.call(io, peer::write_zeroes(1, 1, 3, 65536, false), &[]).status, 0);
    let zeroed = What::Zero { blocks: 65536, deallocate: false };
    assert_eq!(w.host.drives[0].history.last(), Some(&(3, zeroed)));
}
