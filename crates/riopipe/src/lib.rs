//! Ordered volumes over NVMe-oF: a write goes after another without anyone waiting.
//!
//! A [`Volume`] spans drives on one or several targets. A [`Stream`] of it takes *groups* of
//! writes: groups are ordered, the writes inside one are not. After a crash the volume holds, for
//! each stream, every group up to some point and no fresh block of a later one.
//!
//! ```no_run
//! use riopipe::{OpenOptions, Place, StreamOptions, Until, Volume};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let members = ["10.0.0.1:4420".parse()?, "10.0.0.2:4420".parse()?];
//! let (volume, recovery) = Volume::open("logs", &members, &OpenOptions::default())?;
//! println!("{recovery}"); // what a crash has left, or that there was none
//! let mut stream = volume.stream(0, &StreamOptions::default())?;
//!
//! let mut record = stream.buf(4096);
//! record[..5].copy_from_slice(b"hello");
//! stream.group().write(0, record, Place::Fresh).tag(1).submit()?; // returns at once
//!
//! let commit = stream.buf(4096);
//! let seq = stream.group().write(1, commit, Place::Fresh).tag(2).submit_durable()?;
//! stream.wait(Until::Durable(seq), None)?; // both are safe, in this order
//!
//! stream.close()?;
//! volume.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # What happens when things fail
//!
//! - **This process dies.** Its targets keep the volume for it for a while
//!   ([`OpenOptions::wait_for_lease`], [`OpenOptions::take_over`]). Whoever opens it next recovers
//!   it: [`Volume::open`] returns how far each stream reaches and with which tag, what was undone,
//!   and which in-place updates are in doubt. [`Volume::recover`] does the same by hand, or only
//!   looks.
//! - **A target dies or a connection breaks.** Streams wait for it, up to
//!   [`ConnectOptions::loss_timeout`]; when it is back it gets again what it has lost. Then the
//!   streams that need it fail.
//! - **A stream fails.** Every call says why, others go on, and [`Stream::reopen`] undoes what is
//!   beyond its last whole group and brings it back.
//!
//! # What it is doing
//!
//! [`Volume::stat`] tells how far each stream is and where the time of the groups goes;
//! [`Volume::serve_metrics`] tells it to Prometheus and to `rio volume stat`, at a loopback address.
//! Neither keeps a stream waiting.
//!
//! # Threads
//!
//! A stream belongs to one thread at a time, which builds, sends and reaps in its own calls: there
//! is no lock and no other thread on the way of a write, only a flag that says who has the stream.
//! While its owner is elsewhere, one background thread for each volume takes the stream over. One
//! thread for each target keeps the connection to it alive and makes new ones.

mod addr;
mod assemble;
mod association;
mod background;
mod create;
mod drive_io;
mod errand;
mod error;
mod group;
mod identity;
mod info;
mod open;
mod piece;
mod recover;
mod recovery;
mod shared;
mod sockets;
mod start;
mod stat;
mod stream;
mod stream_shell;
mod sync;
mod target;
pub mod undone;
mod volume;
mod watched;

pub use addr::{MemberAddr, ParseMemberError};
pub use association::discover;
pub use error::{
    AcknowledgeError, AttachError, CallError, CloseError, CreateError, OpenError, ReadError,
    RecoverError, ReopenError, StreamError, StreamFailure, SubmitError, WaitError, Why,
};
pub use group::Group;
pub use identity::ConnectOptions;
pub use info::{MemberInfo, VolumeInfo};
pub use piece::Buf;
pub use recovery::{BlockRange, InPlaceRange, Recovery, Steps, StreamRecovery};
pub use riopipe_metrics::{
    Endpoint as MetricsEndpoint, MetricsError, Source as MetricsSource, StageStat,
};
pub use riopipe_nvme::discovery;
pub use riopipe_order::attribute::{Seq, StreamId, VolumeId};
pub use riopipe_order::engine::{EngineKind, Marks, Place};
pub use riopipe_session::claim::ClaimError;
pub use riopipe_session::initiator::stream_driver::Until;
pub use riopipe_session::stages;
pub use riopipe_session::wire::LogKind;
pub use stat::{StreamStat, TargetLink, VolumeStat};
pub use stream::{Readiness, Stream, StreamOptions, Watch};
pub use volume::{CreateOptions, OpenOptions, RecoverOptions, RecoverProgress, Volume};

/// Bytes of a block: volumes are addressed in blocks of 4 KiB.
pub const BLOCK_BYTES: usize = riopipe_session::wire::BLOCK_BYTES;

/// CRC32C in append form, with the processor's instructions: `crc32c(0, data)` is the checksum of
/// `data`, and `crc32c(crc32c(0, a), b)` that of `a` followed by `b`. Digests, labels and logs have
/// it.
#[must_use]
pub fn crc32c(running: u32, data: &[u8]) -> u32 {
    use crc_fast::{CrcAlgorithm, Digest};
    if running == 0 {
        return crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, data) as u32;
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!running));
    digest.update(data);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    #[test]
    fn crc32c_appends() {
        let soft = riopipe_nvme::digest::soft;
        let data: Vec<u8> = (0..5000u32).map(|i| (i * 7) as u8).collect();
        for cut in [0, 1, 7, 64, 4096, 5000] {
            let (a, b) = data.split_at(cut);
            assert_eq!(super::crc32c(super::crc32c(0, a), b), soft(0, &data));
        }
    }
}
