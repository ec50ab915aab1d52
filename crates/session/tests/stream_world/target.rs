//! A target: real connections over [`Media`], killed and started again at will.

use riopipe_nvme::digest::soft;
use riopipe_order::attribute::Member;
use riopipe_order::log_region::{HEADER_BYTES, LogKind, LogRegion, MemberNamespace};
use riopipe_order::region::Region;
use riopipe_order::write_order::DriveOrder;
use riopipe_session::outbox::Outbox;
use riopipe_session::target::{
    ConnId, Identity, NamespaceConfig, Namespaces, Shared, Split, TargetConn, Volumes,
};
use riopipe_session::wire::{self, Claim};

use super::media::{Drive, Media};
use super::region::{Part, Parts};
use crate::peer::{self, Digests, HOSTID, HOSTNQN};
use crate::stream_rig::{SUBNQN, VOLUME, all};
use riopipe_testkit::Random;

const BOOT: [u8; 16] = [9; 16];
const LOG_BYTES: usize = 1 << 20;
const DRIVE_BLOCKS: u64 = 64;

fn crc(crc: u32, data: &[u8]) -> u32 {
    soft(crc, data)
}

fn identity() -> Identity {
    Identity::open_to_all(SUBNQN, "RIO0001")
}

struct Conn {
    conn: TargetConn<Media>,
    out: Outbox<Vec<u8>>,
    input: Vec<u8>,
    closed: bool,
}

pub(crate) struct Target {
    /// The drives: namespaces 1, 2, …
    members: Vec<MemberNamespace>,
    volatile: Vec<bool>,
    streams: u16,
    slots: u32,
    parts: Parts,
    pub(crate) media: Media,
    conns: Vec<Conn>,
    /// The owner's association, if there is one: its admin connection, its controller.
    pub(crate) owner: Option<(usize, u16)>,
}

fn start(volatile: &[bool], parts: &Parts, drives: Vec<Drive>) -> Media {
    let header = parts.part(0..HEADER_BYTES);
    let mut first = [0; 8];
    header.read(0, &mut first);
    let region = if first == [0; 8] {
        LogRegion::create(header, LOG_BYTES, [3; 16], BOOT, LogKind::Dax, crc).unwrap()
    } else {
        LogRegion::open(header, LOG_BYTES, BOOT, crc).unwrap()
    };
    let mine = parts.clone();
    let split: Split<Part> = Box::new(move |range| Ok(mine.part(range)));
    let (volumes, problems) = Volumes::with_log(region, split, crc);
    assert_eq!(problems, Vec::<String>::new());
    let namespaces = volatile.iter().zip(1..).map(|(volatile, nsid)| NamespaceConfig {
        nsid,
        blocks: DRIVE_BLOCKS,
        lba_size: Default::default(),
        ana_group: 1,
        nguid: [nsid as u8; 16],
        uuid: [0x10 + nsid as u8; 16],
        volatile: *volatile,
        order: DriveOrder::None,
    });
    let namespaces = Namespaces::new(namespaces.collect()).unwrap();
    let shared = Shared::new(identity(), namespaces, volumes, 1 << 40);
    Media { shared, drives, notices: vec![], now: 1 << 40 }
}

impl Target {
    /// Freshly made, and owned: drives with their numbers in the volume, and whether their caches
    /// are volatile.
    pub(crate) fn new(drives: &[(u8, bool)], streams: u16, slots: u32) -> Self {
        let parts = Parts::default();
        let volatile: Vec<bool> = drives.iter().map(|(_, volatile)| *volatile).collect();
        let members = drives.iter().zip(1..).map(|((member, _), nsid)| {
            let member = Member(*member);
            MemberNamespace { member, nsid }
        });
        let media = start(&volatile, &parts, volatile.iter().map(|v| Drive::new(*v)).collect());
        let members = members.collect();
        let mut target =
            Self { members, volatile, streams, slots, parts, media, conns: vec![], owner: None };
        target.claim(1, false);
        target
    }

    /// A new connection.
    pub(crate) fn accept(&mut self) -> usize {
        let at = self.conns.len();
        let conn = TargetConn::new(ConnId(100 + at as u64), at as u64, crc, self.media.now);
        self.conns.push(Conn { conn, out: Outbox::new(), input: vec![], closed: false });
        at
    }

    /// Bytes have come.
    pub(crate) fn feed(&mut self, at: usize, bytes: &[u8]) {
        let Self { conns, media, .. } = self;
        let conn = &mut conns[at];
        conn.input.extend_from_slice(bytes);
        while !conn.closed && conn.conn.wants_input(&conn.out) {
            match conn.conn.receive(&conn.input, media, &mut conn.out) {
                Ok(0) => break,
                Ok(used) => drop(conn.input.drain(..used)),
                Err(closed) => {
                    conn.conn.close(&closed.to_string(), media);
                    conn.closed = true;
                }
            }
        }
        self.deliver();
    }

    /// The connection has ended.
    pub(crate) fn end(&mut self, at: usize) {
        let Self { conns, media, .. } = self;
        if !std::mem::replace(&mut conns[at].closed, true) {
            conns[at].conn.close("the socket died", media);
        }
        self.deliver();
    }

    pub(crate) fn is_closed(&self, at: usize) -> bool {
        self.conns[at].closed
    }

    /// The bytes that are sent on a connection.
    pub(crate) fn sent(&mut self, at: usize) -> Vec<u8> {
        let Self { conns, media, .. } = self;
        let conn = &mut conns[at];
        let bytes = all(&mut conn.out);
        if !conn.closed {
            conn.conn.sent(media, &mut conn.out);
        }
        bytes
    }

    fn deliver(&mut self) {
        while let Some(id) = self.media.notices.pop() {
            let Self { conns, media, .. } = self;
            let Some(conn) = conns.iter_mut().find(|conn| conn.conn.id() == id) else { continue };
            if let Err(closed) = conn.conn.noticed(media, &mut conn.out)
                && !std::mem::replace(&mut conn.closed, true)
            {
                conn.conn.close(&closed.to_string(), media);
            }
        }
    }

    /// How many operations are in flight.
    pub(crate) fn busy(&self) -> usize {
        self.media.drives.iter().map(|drive| drive.pending.len()).sum()
    }

    /// Ends any one operation.
    pub(crate) fn work(&mut self, random: &mut Random) {
        let busy: Vec<usize> = (0..self.volatile.len())
            .filter(|i| !self.media.drives[*i].pending.is_empty())
            .collect();
        if busy.is_empty() {
            return;
        }
        let ns = busy[random.index(busy.len())];
        let at = random.index(self.media.drives[ns].pending.len());
        self.finish(ns, at);
    }

    /// Ends the oldest operation of each drive until there are none.
    pub(crate) fn work_all(&mut self) {
        for ns in 0..self.volatile.len() {
            while !self.media.drives[ns].pending.is_empty() {
                self.finish(ns, 0);
            }
        }
    }

    fn finish(&mut self, ns: usize, at: usize) {
        let (op, result) = self.media.end(ns, at);
        let Self { conns, media, .. } = self;
        let conn = &mut conns[op.key() as usize];
        conn.conn.device_done(op, result, media, &mut conn.out);
        conn.conn.batch_ended(media, &mut conn.out);
        self.deliver();
    }

    /// Dies and starts again, with or without a power cut; it has no owner then.
    pub(crate) fn restart(&mut self, power: bool, random: &mut Random) {
        let mut drives = std::mem::take(&mut self.media.drives);
        for drive in &mut drives {
            drive.crash(power, random);
        }
        self.conns.clear();
        if power {
            self.parts = self.parts.crash(random.next());
        }
        self.media = start(&self.volatile, &self.parts, drives);
        self.owner = None;
    }

    /// The owner's association ends.
    pub(crate) fn end_association(&mut self) {
        if let Some((admin, _)) = self.owner.take() {
            self.end(admin);
        }
    }

    /// A host makes an association and claims the volume with this generation, waiting for
    /// operations in flight: as the owner that comes back, or as the first, or as one that takes
    /// over.
    pub(crate) fn claim(&mut self, generation: u32, resume: bool) {
        let admin = self.accept();
        let mut answers = vec![];
        let mut call = |target: &mut Self, pdu: Vec<u8>| {
            target.feed(admin, &pdu);
            for _ in 0..1000 {
                answers.extend(target.sent(admin));
                if let Some(answer) = peer::parse(&mut answers, Digests::default(), 0) {
                    return answer;
                }
                target.work_all();
            }
            panic!("no answer");
        };
        call(self, peer::icreq(Digests::default(), 0));
        let encode = |sqe: peer::Sqe, data: &[u8]| peer::capsule(Digests::default(), &sqe.0, data);
        let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, 0xffff);
        let connected = call(self, encode(peer::connect(0, 0, 31, 0), &data)).completion();
        assert_eq!(connected.status, 0);
        call(self, encode(peer::property_set(1, 0x14, peer::CC_ENABLE), &[]));
        let claim = Claim {
            create: generation == 1 && !resume,
            take_over: generation > 1 && !resume,
            resume,
            slots: self.slots,
            lease_ms: 45_000,
            ..Claim::plain(VOLUME, generation, self.streams, self.members.clone())
        };
        let sqe = peer::Sqe(wire::claim_command().0).byte(1, 0x40).byte(2, 50).inline(4096);
        let claimed = call(self, encode(sqe, &claim.encode())).completion();
        assert_eq!(claimed.status, 0, "{claim:?}");
        self.owner = Some((admin, connected.result as u16));
    }
}
