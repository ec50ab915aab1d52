//! Reads of blocks that engine `horae` has redirected, while their stream fails (P9). The targets are
//! scripts; the test reads the bytes that are sent to them.

mod stream_rig;

use std::sync::Arc;

use peer::target::{Command, Script};
use riopipe_nvme::command::Status;
use riopipe_order::attribute::Seq;
use riopipe_order::engine::{Cause, EngineKind, Limits, Op, Place, Write, engine};
use riopipe_order::topology::PreparePart;
use riopipe_session::initiator::queue_pair::{QpConfig, QueuePair};
use riopipe_session::initiator::stream::{
    ReadBarrier, ReadExtent, ReadPartFailure, ReadSlot, SharedRedirections, StreamQueue,
    StreamSession,
};
use riopipe_session::wire::IO_ORDER;
use riopipe_testkit::peer;
use stream_rig::{Piece, Redirected, Rig, SUBNQN, Shape, block, new_queue, piece, shared};

const SLOT: ReadSlot = ReadSlot(0);
const WRITE: u8 = 0x01;
const READ: u8 = 0x02;
/// The first block of the data area, and that of the prepare area before it.
const DATA: u64 = 16;
const AREA: u64 = 8;

/// Engine `horae` on a drive with a volatile cache, and a reader of the volume.
struct World {
    writer: Rig,
    reader: Rig,
    barrier: Arc<ReadBarrier>,
}

impl World {
    fn new() -> Self {
        let shape = Shape { engine: EngineKind::Horae, loss_ns: 0, ..Shape::of(1, true) };
        let reading = Shape { engine: EngineKind::None, ..Shape::of(1, true) };
        let (failures, barrier) = shared(&shape);
        let redirections: Arc<dyn SharedRedirections> = Arc::<Redirected>::default();
        let rig = |shape: Shape, stream| {
            let topology = shape.topology().with_prepare_area((DATA - AREA) as u32, 1);
            let prepare = PreparePart { first: 0, blocks: (DATA - AREA) as u32 };
            let limits = Limits { merge: false, prepare, ..Limits::default() };
            let session = StreamSession::new(
                shape.config(stream, 1),
                engine(shape.engine, topology.clone(), limits),
                topology,
                vec![new_queue(&shape)],
                Arc::clone(&failures),
                &barrier,
            );
            let session = session.redirecting(&redirections);
            Rig { shape, session, scripts: vec![Script::default()], now: 1 << 40, read: vec![] }
        };
        let mut writer = rig(shape, 0);
        writer.session.start(writer.now);
        writer.carry();
        let mut writer = writer.bound(1);
        // What a reader of an earlier run has read is over.
        writer.carry();
        let mut reader = rig(reading, 1);
        reader.session = reader.session.reads_only();
        reader.session.start(reader.now);
        reader.carry();
        Self { writer, reader, barrier }
    }

    /// Updates a block, up to the completion of its data in the prepare area.
    fn update(&mut self, lba: u64, content: u64) {
        let op = Op::Write(Place::InPlace, piece(content, 1));
        self.writer.submit(&[Write { lba, blocks: 1, op }]);
        let order = self.writer.take_one(0, IO_ORDER);
        self.writer.answer(0, &order, 0);
        let data = self.writer.take_one(0, WRITE);
        self.writer.answer(0, &data, 0);
    }

    /// The block on the drive that a read of this block is sent to.
    fn read_of(&mut self, lba: u64) -> (u64, Command) {
        self.reader.session.start_read(SLOT, &[ReadExtent { lba, blocks: 1 }]);
        let read = self.reader.take_one(0, READ);
        (place(&read), read)
    }
}

fn place(read: &Command) -> u64 {
    u64::from(read.dword(10))
}

/// A queue to the target in this incarnation.
fn queue(incarnation: u32) -> StreamQueue<Piece> {
    let hostnqn = "nqn.2014-08.org.nvmexpress:uuid:1";
    let soft = riopipe_nvme::digest::soft;
    let mut admin = QpConfig::admin(hostnqn.into(), [7; 16], SUBNQN.into(), soft);
    admin.data_max = 1 << 20;
    let mut config = admin.io_queue(1, 1, 32);
    config.incarnation = Some(incarnation);
    QueuePair::new(config)
}

#[test]
fn p9_a_read_in_flight_is_placed_again_when_the_stream_of_the_update_has_failed() {
    let mut world = World::new();
    world.update(3, 30);
    let (at, read) = world.read_of(3);
    assert_eq!(at, AREA, "the update is in the prepare area");
    // The target is cut off, and comes back without what was in the cache of its drive. So the block
    // of the area may have the content of another block. The reader is back first.
    world.reader.cut(0);
    world.reader.scripts[0] = Script::default();
    world.reader.session.rejoin(0, queue(2), world.reader.now);
    assert_eq!(world.reader.take(0), [], "the stream has not noticed the loss");
    world.writer.cut(0);
    assert!(world.writer.session.poll().is_err(), "engine horae does not replay");
    let again = world.reader.take_one(0, READ);
    assert_eq!(place(&again), DATA + 3, "{read:?}: what is durable is at home");
    world.reader.scripts[0].answer_data(&again, block(3));
    world.reader.carry();
    assert_eq!(world.reader.session.read_result(SLOT), Ok(()));
    assert_eq!(world.reader.read, block(3));
    // Later reads, too.
    assert_eq!(world.read_of(3).0, DATA + 3);
}

#[test]
fn p9_the_connection_of_a_reader_alone_changes_nothing() {
    let mut world = World::new();
    world.update(3, 30);
    let (at, _) = world.read_of(3);
    world.reader.cut(0);
    world.reader.session.rejoin(0, queue(1), world.reader.now);
    let again = world.reader.take_one(0, READ);
    assert_eq!(place(&again), at);
    assert_eq!(world.writer.marks(), (1, 0));
    assert_eq!(world.writer.session.engine().oldest_redirected(), Some(Seq(1)));
}

/// A FLUSH of the drive has failed, and it has lost what it had in its cache. The reader's answer comes
/// before the stream knows of that. A block of the area has what was there before, which is of another
/// block of the volume.
#[test]
fn p9_t22_a_read_of_a_redirected_block_that_its_drive_has_lost_fails() {
    for (content, is_lost) in [(30, false), (29, true)] {
        // In one piece, and in pieces that do not end with a block.
        for piece_len in [8192, 3000] {
            let mut world = World::new();
            world.update(3, 30);
            world.update(4, 31);
            world.reader.session.start_read(SLOT, &[ReadExtent { lba: 3, blocks: 2 }]);
            let read = world.reader.take_one(0, READ);
            assert_eq!(place(&read), AREA);
            let data = [block(content), block(31)].concat();
            world.reader.scripts[0].answer_pieces(&read, &data, piece_len);
            world.reader.carry();
            let result = world.reader.session.read_result(SLOT);
            let lost = ReadPartFailure { offset: 0, status: Status::UNRECOVERED_READ };
            assert_eq!(result, if is_lost { Err(lost) } else { Ok(()) }, "{content} {piece_len}");
            // What is at home may have any content.
            let (_, home) = world.read_of(9);
            world.reader.scripts[0].answer_data(&home, block(7));
            world.reader.carry();
            assert_eq!(world.reader.session.read_result(SLOT), Ok(()));
        }
    }
}

/// The connection of a reader is lost in the middle of an answer. The data comes again, whole.
#[test]
fn a_read_of_a_redirected_block_is_checked_from_its_start_when_it_is_sent_again() {
    let mut world = World::new();
    world.update(3, 30);
    let (_, read) = world.read_of(3);
    let answer = &mut world.reader.scripts[0];
    answer.answer_pieces(&read, &block(30), 3000);
    // The first of two PDUs.
    answer.output.truncate(24 + 3000);
    world.reader.carry();
    world.reader.cut(0);
    world.reader.scripts[0] = Script::default();
    world.reader.session.rejoin(0, queue(1), world.reader.now);
    let again = world.reader.take_one(0, READ);
    world.reader.scripts[0].answer_data(&again, block(30));
    world.reader.carry();
    assert_eq!(world.reader.session.read_result(SLOT), Ok(()));
}

/// Reads of an attached volume wait for the device to fail after a stream has failed. A session that only
/// reads fails no device.
#[test]
fn p8_a_session_that_only_reads_fails_alone() {
    let mut world = World::new();
    world.reader.cut(0);
    world.reader.session.give_up(0, Cause::Disconnected);
    assert!(!world.barrier.has_failed_stream());
    world.writer.cut(0);
    world.writer.session.give_up(0, Cause::Disconnected);
    assert!(world.barrier.has_failed_stream());
}
