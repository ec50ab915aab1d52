//! The streams of hosts on a drive with an order-preserving FTL (engine `opimq`).
//!
//! A host numbers its streams by itself, and so do other hosts, and other volumes of the same host.
//! The target gives each stream of each association a stream of the drive. The epochs of a host's
//! stream begin with 0; those of the drive's stream go on from where the stream was begun.
//!
//! ```text
//! first command of the stream, on any connection ─▶ join: a free stream of the drive
//! each connection that has used it ends          ─▶ close, then leave when its operations are back
//! its own have closed: the drive ends the stream ─▶ what waits for writes that will not come fails
//! all have left: the drive begins it anew        ─▶ ended: it is free again
//! ```
//!
//! The connections of a stream are *its own*. A connection of another stream uses it, too, if that
//! names it as the follower of a dual-stream write. When a stream's own connections have ended, no
//! epoch of its own will come, so the drive must not wait for one, although others still name it. A
//! host closes them only when what the stream follows is durable, unless it gives up the stream.
//!
//! The drive begins the stream anew before another host gets it. So nothing that the last owner has
//! left there holds the next one up, or becomes a part of its order.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::write_order::{EpochId, EpochWrite};

/// The most streams of a drive that hosts may use at the same time (trap T28).
pub(super) const DRIVE_STREAMS_MAX: u16 = 1024;

/// The most of them that one association may use, so that a host does not take all of them.
pub(super) const ASSOCIATION_STREAMS_MAX: usize = DRIVE_STREAMS_MAX as usize / 2;

/// A stream of a host: its association, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct HostStream {
    pub(super) association: u64,
    pub(super) stream: u16,
}

/// The stream of the drive that stands for a host's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriveStream {
    /// Its number.
    pub(super) stream: u16,
    /// The lower 16 bits of the number of the epoch that stands for the host's epoch 0.
    pub(super) first: u16,
    /// How many FLUSHes of the drive had failed when the host began to use the stream. If more have
    /// failed when a FLUSH of the stream succeeds, writes of the stream may be lost (trap T22).
    pub(super) failures: u64,
}

impl DriveStream {
    /// The drive's name for an epoch of the host.
    pub(super) const fn epoch(self, epoch: u16) -> EpochId {
        EpochId { stream: self.stream, epoch: self.first.wrapping_add(epoch) }
    }

    /// The epoch with which the stream begins.
    pub(super) const fn begin(self) -> EpochId {
        self.epoch(0)
    }
}

/// In which way a connection uses a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It is a connection of the stream.
    Own,
    /// It is a connection of another stream, which the stream follows.
    Follower,
}

/// The use of a stream of the drive.
#[derive(Debug)]
struct Use {
    drive: DriveStream,
    /// The number of its own connections that have used it and are not closed.
    open_count: u32,
    /// The number of connections that have used it and have operations in flight, or may have.
    user_count: u32,
}

/// The streams of one drive.
#[derive(Debug, Default)]
pub(super) struct EpochStreams {
    uses: BTreeMap<HostStream, Use>,
    /// The streams that were used before and are free now.
    free: Vec<u16>,
    /// The number of streams that were ever used.
    used_count: u16,
    /// The epoch with which each stream of the drive begins.
    first: u16,
}

impl EpochStreams {
    /// The streams of a drive whose streams begin with this epoch.
    pub(super) fn new(first: u16) -> Self {
        Self { first, ..Self::default() }
    }

    /// Notes that one more connection uses a stream of a host, as its own or as a follower.
    /// `failures` is the number of FLUSHes of the drive that have failed. `None`: too many streams
    /// are in use.
    pub(super) fn join(
        &mut self,
        host: HostStream,
        role: Role,
        failures: u64,
    ) -> Option<DriveStream> {
        let open_count = u32::from(role == Role::Own);
        if let Some(used) = self.uses.get_mut(&host) {
            used.open_count += open_count;
            used.user_count += 1;
            return Some(used.drive);
        }
        let of_association = |stream| HostStream { association: host.association, stream };
        let range = of_association(0)..=of_association(u16::MAX);
        if self.uses.range(range).count() >= ASSOCIATION_STREAMS_MAX {
            return None;
        }
        let stream = match self.free.pop() {
            Some(stream) => stream,
            None if self.used_count >= DRIVE_STREAMS_MAX => return None,
            None => {
                self.used_count += 1;
                self.used_count
            }
        };
        let drive = DriveStream { stream, first: self.first, failures };
        self.uses.insert(host, Use { drive, open_count, user_count: 1 });
        Some(drive)
    }

    /// Notes that a connection that has named the stream as a follower is one of its own.
    pub(super) fn becomes_own(&mut self, host: HostStream) {
        if let Some(used) = self.uses.get_mut(&host) {
            used.open_count += 1;
        }
    }

    /// Notes that a connection that uses the stream is closed. Returns the stream of the drive if
    /// none of its own is open any more: no further write of its own will come, so the drive must
    /// not wait for one.
    pub(super) fn close(&mut self, host: HostStream, role: Role) -> Option<DriveStream> {
        let used = self.uses.get_mut(&host)?;
        used.open_count -= u32::from(role == Role::Own);
        (used.open_count == 0).then_some(used.drive)
    }

    /// Notes that all operations of a closed connection that uses the stream have come back.
    /// Returns the stream of the drive if that was the last one: the drive must begin it anew, and
    /// then it has [`ended`](Self::ended).
    pub(super) fn leave(&mut self, host: HostStream) -> Option<DriveStream> {
        let used = self.uses.get_mut(&host)?;
        used.user_count -= 1;
        if used.user_count > 0 {
            return None;
        }
        self.uses.remove(&host).map(|used| used.drive)
    }

    /// Notes that the drive has begun a stream anew after all users have left. It may be used
    /// again.
    pub(super) fn ended(&mut self, stream: u16) {
        self.free.push(stream);
    }
}

/// A stream that a connection uses on a drive.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedStream {
    /// The stream, as the host names it.
    pub(super) stream: u16,
    /// In which way the connection uses it.
    pub(super) role: Role,
    drive: DriveStream,
}

/// The streams that one connection uses on one drive.
#[derive(Debug, Default)]
pub(super) struct UsedStreams(Vec<UsedStream>);

impl UsedStreams {
    /// The stream of the drive that stands for a stream of the host, if the connection uses it.
    pub(super) fn find(&self, stream: u16) -> Option<DriveStream> {
        self.0.iter().find(|used| used.stream == stream).map(|used| used.drive)
    }

    /// Adds a stream that the connection uses from now on.
    pub(super) fn add(&mut self, stream: u16, role: Role, drive: DriveStream) {
        self.0.push(UsedStream { stream, role, drive });
    }

    /// Notes that the connection is one of the stream's own, if it has named it as a follower only.
    /// Returns whether it had.
    pub(super) fn becomes_own(&mut self, stream: u16) -> bool {
        let is_follower =
            |used: &&mut UsedStream| used.stream == stream && used.role == Role::Follower;
        match self.0.iter_mut().find(is_follower) {
            Some(used) => {
                used.role = Role::Own;
                true
            }
            None => false,
        }
    }

    /// The streams.
    pub(super) fn iter(&self) -> impl Iterator<Item = UsedStream> + '_ {
        self.0.iter().copied()
    }

    /// The place of a write in the streams of the drive, if the connection uses all of them.
    pub(super) fn translate(&self, write: EpochWrite) -> Option<EpochWrite> {
        let id = |id: EpochId| self.find(id.stream).map(|drive| drive.epoch(id.epoch));
        let follower = match write.follower {
            Some(follower) => Some(id(follower)?),
            None => None,
        };
        Some(EpochWrite { own: id(write.own)?, follower, ..write })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn host(association: u64, stream: u16) -> HostStream {
        HostStream { association, stream }
    }

    #[test]
    fn each_stream_of_each_association_has_a_stream_of_the_drive() {
        let mut streams = EpochStreams::new(65_535);
        let first = streams.join(host(1, 7), Role::Own, 0).unwrap();
        assert_eq!(
            streams.join(host(1, 7), Role::Own, 0),
            Some(first),
            "another connection of the same host"
        );
        let others = [host(1, 8), host(2, 7)].map(|host| streams.join(host, Role::Own, 0).unwrap());
        assert_eq!([first.stream, others[0].stream, others[1].stream], [1, 2, 3], "never 0");
        assert_eq!(first.epoch(2), EpochId { stream: 1, epoch: 1 }, "epochs wrap");
    }

    #[test]
    fn a_stream_is_free_again_when_the_drive_has_begun_it_anew() {
        let mut streams = EpochStreams::default();
        let used = streams.join(host(1, 7), Role::Own, 0).unwrap();
        streams.join(host(1, 7), Role::Own, 0).unwrap();
        assert_eq!(streams.close(host(1, 7), Role::Own), None);
        assert_eq!(streams.leave(host(1, 7)), None);
        assert_eq!(streams.close(host(1, 7), Role::Own), Some(used), "no further write will come");
        assert_eq!(streams.leave(host(1, 7)), Some(used));
        let next = streams.join(host(2, 7), Role::Own, 0).unwrap();
        assert_ne!(next.stream, used.stream, "the drive has not begun it anew yet");
        streams.ended(used.stream);
        assert_eq!(streams.join(host(3, 7), Role::Own, 0).map(|it| it.stream), Some(used.stream));
    }

    #[test]
    fn t28_the_streams_of_a_drive_are_bounded() {
        let mut streams = EpochStreams::default();
        let most = ASSOCIATION_STREAMS_MAX as u16;
        for stream in 1..=most {
            assert!(streams.join(host(1, stream), Role::Own, 0).is_some());
        }
        assert_eq!(streams.join(host(1, most + 1), Role::Own, 0), None, "one association");
        assert!(streams.join(host(1, 1), Role::Own, 0).is_some(), "another connection");
        for stream in 1..=DRIVE_STREAMS_MAX - most {
            assert!(streams.join(host(2, stream), Role::Follower, 0).is_some());
        }
        assert_eq!(streams.join(host(3, 1), Role::Own, 0), None, "all associations");
    }

    #[test]
    fn a_drive_ends_a_stream_when_its_own_connections_have_closed() {
        let mut streams = EpochStreams::default();
        let used = streams.join(host(1, 7), Role::Own, 0).unwrap();
        assert_eq!(streams.join(host(1, 7), Role::Follower, 0), Some(used));
        assert_eq!(streams.close(host(1, 7), Role::Own), Some(used), "only a leader is left");
        assert_eq!(streams.leave(host(1, 7)), None, "which may still have writes in flight");
        assert_eq!(streams.close(host(1, 7), Role::Follower), Some(used));
        assert_eq!(streams.leave(host(1, 7)), Some(used));
        // A follower's connection that becomes the stream's own keeps it.
        let used = streams.join(host(1, 8), Role::Follower, 0).unwrap();
        streams.becomes_own(host(1, 8));
        streams.join(host(1, 8), Role::Follower, 0).unwrap();
        assert_eq!(streams.close(host(1, 8), Role::Follower), None);
        assert_eq!(streams.close(host(1, 8), Role::Own), Some(used));
    }

    #[test]
    fn both_epochs_of_a_write_are_translated() {
        let mut used = UsedStreams::default();
        used.add(7, Role::Own, DriveStream { stream: 1, first: 10, failures: 0 });
        let own = EpochId { stream: 7, epoch: 3 };
        let alone = EpochWrite { own, follower: None, barrier: true };
        let translated = EpochId { stream: 1, epoch: 13 };
        assert_eq!(used.translate(alone), Some(EpochWrite { own: translated, ..alone }));
        let follower = EpochId { stream: 9, epoch: 65_535 };
        let dual = EpochWrite { follower: Some(follower), ..alone };
        assert_eq!(used.translate(dual), None, "the follower is not used yet");
        used.add(9, Role::Follower, DriveStream { stream: 2, first: 4, failures: 0 });
        let follower = EpochId { stream: 2, epoch: 3 };
        let expected = EpochWrite { own: translated, follower: Some(follower), ..alone };
        assert_eq!(used.translate(dual), Some(expected));
        let uses = used.iter().map(|used| (used.stream, used.role)).collect::<Vec<_>>();
        assert_eq!(uses, [(7, Role::Own), (9, Role::Follower)]);
        assert!(!used.becomes_own(7) && used.becomes_own(9) && !used.becomes_own(9));
    }
}
