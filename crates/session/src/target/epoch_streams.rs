//! The streams of hosts on a drive with an order-preserving FTL (engine `opimq`).
//!
//! A host numbers its streams by itself, and so do other hosts, and other volumes of the same host.
//! The target gives each stream of each association a stream of the drive. The epochs of a host's
//! stream begin with 0; those of the drive's stream go on from where the stream was begun.
//!
//! ```text
//! first command of the stream, on any connection ─▶ join: a free stream of the drive
//! each connection that has used it ends          ─▶ close, then leave when its operations are back
//! all have closed: the drive ends the stream     ─▶ what waits for writes that will not come fails
//! all have left: the drive begins it anew        ─▶ ended: it is free again
//! ```
//!
//! The drive begins the stream anew before another host gets it. So nothing that the last owner has
//! left there holds the next one up, or becomes a part of its order.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use riopipe_order::write_order::{EpochId, EpochWrite};

/// The most streams of a drive that hosts may use at the same time (trap T28).
pub(super) const DRIVE_STREAMS_MAX: u16 = 1024;

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

/// The use of a stream of the drive.
#[derive(Debug)]
struct Use {
    drive: DriveStream,
    /// The number of connections that have used it and are not closed.
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

    /// Notes that one more connection uses a stream of a host. `failures` is the number of FLUSHes
    /// of the drive that have failed. `None`: too many streams are in use.
    pub(super) fn join(&mut self, host: HostStream, failures: u64) -> Option<DriveStream> {
        if let Some(used) = self.uses.get_mut(&host) {
            used.open_count += 1;
            used.user_count += 1;
            return Some(used.drive);
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
        self.uses.insert(host, Use { drive, open_count: 1, user_count: 1 });
        Some(drive)
    }

    /// Notes that a connection that uses the stream is closed. Returns the stream of the drive if
    /// that was the last one: no further write will come, so the drive must not wait for one.
    pub(super) fn close(&mut self, host: HostStream) -> Option<DriveStream> {
        let used = self.uses.get_mut(&host)?;
        used.open_count -= 1;
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

/// The streams that one connection uses on one drive, each as the host and the drive name it.
#[derive(Debug, Default)]
pub(super) struct UsedStreams(Vec<(u16, DriveStream)>);

impl UsedStreams {
    /// The stream of the drive that stands for a stream of the host, if the connection uses it.
    pub(super) fn find(&self, stream: u16) -> Option<DriveStream> {
        self.0.iter().find(|(host, _)| *host == stream).map(|(_, drive)| *drive)
    }

    /// Adds a stream that the connection uses from now on.
    pub(super) fn add(&mut self, stream: u16, drive: DriveStream) {
        self.0.push((stream, drive));
    }

    /// The streams, as the host names them.
    pub(super) fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        self.0.iter().map(|(host, _)| *host)
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
        let first = streams.join(host(1, 7), 0).unwrap();
        assert_eq!(streams.join(host(1, 7), 0), Some(first), "another connection of the same host");
        let others = [host(1, 8), host(2, 7)].map(|host| streams.join(host, 0).unwrap());
        assert_eq!([first.stream, others[0].stream, others[1].stream], [1, 2, 3], "never 0");
        assert_eq!(first.epoch(2), EpochId { stream: 1, epoch: 1 }, "epochs wrap");
    }

    #[test]
    fn a_stream_is_free_again_when_the_drive_has_begun_it_anew() {
        let mut streams = EpochStreams::default();
        let used = streams.join(host(1, 7), 0).unwrap();
        streams.join(host(1, 7), 0).unwrap();
        assert_eq!(streams.close(host(1, 7)), None);
        assert_eq!(streams.leave(host(1, 7)), None);
        assert_eq!(streams.close(host(1, 7)), Some(used), "no further write will come");
        assert_eq!(streams.leave(host(1, 7)), Some(used));
        let next = streams.join(host(2, 7), 0).unwrap();
        assert_ne!(next.stream, used.stream, "the drive has not begun it anew yet");
        streams.ended(used.stream);
        assert_eq!(streams.join(host(3, 7), 0).map(|it| it.stream), Some(used.stream));
    }

    #[test]
    fn t28_the_streams_of_a_drive_are_bounded() {
        let mut streams = EpochStreams::default();
        for stream in 1..=DRIVE_STREAMS_MAX {
            assert!(streams.join(host(1, stream), 0).is_some());
        }
        assert_eq!(streams.join(host(2, 1), 0), None);
        assert!(streams.join(host(1, 1), 0).is_some());
    }

    #[test]
    fn both_epochs_of_a_write_are_translated() {
        let mut used = UsedStreams::default();
        used.add(7, DriveStream { stream: 1, first: 10, failures: 0 });
        let own = EpochId { stream: 7, epoch: 3 };
        let alone = EpochWrite { own, follower: None, barrier: true };
        let translated = EpochId { stream: 1, epoch: 13 };
        assert_eq!(used.translate(alone), Some(EpochWrite { own: translated, ..alone }));
        let follower = EpochId { stream: 9, epoch: 65_535 };
        let dual = EpochWrite { follower: Some(follower), ..alone };
        assert_eq!(used.translate(dual), None, "the follower is not used yet");
        used.add(9, DriveStream { stream: 2, first: 4, failures: 0 });
        let follower = EpochId { stream: 2, epoch: 3 };
        let expected = EpochWrite { own: translated, follower: Some(follower), ..alone };
        assert_eq!(used.translate(dual), Some(expected));
        assert_eq!(used.iter().collect::<Vec<_>>(), [7, 9]);
    }
}
