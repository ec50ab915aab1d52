//! A log of byte records for databases, on one stream of an ordered volume.
//!
//! Many threads [append](Wal::append) records. One thread packs them into blocks and submits them
//! as ordered groups, without waiting for the groups before. [`Wal::durable`] waits until a record
//! is durable: it blocks, or is a [`Future`] on any runtime. After a crash the log holds a prefix
//! of its records, which [`Wal::records`] reads from any [`Lsn`] on.
//!
//! ```no_run
//! use riopipe::{OpenOptions, Volume};
//! use riopipe_wal::{Wal, WalOptions, WalPlace};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let members = ["10.0.0.1:4420".parse()?];
//! let (volume, recovery) = Volume::open("db", &members, &OpenOptions::default())?;
//! let place = WalPlace { stream: 0, lba: 0, blocks: 65_536 };
//! let (wal, found) = Wal::open(&volume, &recovery, place, &WalOptions::default())?;
//!
//! let replay_from = found.checkpoint.and_then(|c| c.checkpoint).unwrap_or(found.trimmed);
//! for record in wal.records(replay_from) {
//!     let record = record?;
//!     println!("{}: {} bytes", record.lsn, record.bytes.len());
//! }
//!
//! let lsn = wal.append(b"set a = 1")?; // returns at once
//! wal.wait_durable(lsn, None)?; // it is durable, as are all before it
//!
//! let applied = wal.stat().durable; // … once all below this is applied elsewhere:
//! wal.checkpoint(applied, b"")?;
//! wal.trim(applied)?;
//! wal.close(None)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! They follow from the volume's engine. With `rio` and `horae`: after any crash, all records that were
//! reported durable and a prefix of the others, each complete. With `sync`: the same, as long as no
//! durable block is damaged. Engine `none` is refused.
//!
//! A record is never torn: one that a crash has cut does not exist. Lsns only grow: the Lsn of a
//! record that a crash has cut is not used again.
//!
//! # Several logs on one volume
//!
//! Each log has a stream and a range of blocks of its own ([`WalPlace`]). There is no order between
//! them.
//!
//! # The format
//!
//! `docs/wal-format.md`; the crate `riopipe-wal-core` reads and writes it without any I/O.
//!
//! [`Future`]: std::future::Future

mod committer;
mod durable;
mod error;
mod lock;
mod marks;
mod queue;
mod records;
mod wal;

pub use durable::Durable;
pub use error::{
    AppendError, CloseError, CreateError, DurableError, OpenError, PlaceError, ReadError,
    SettleError, TrimError, WalFailure,
};
pub use records::{Record, Records};
pub use riopipe_wal_core::Lsn;
pub use riopipe_wal_core::format::BlockError;
pub use riopipe_wal_core::opening::Changed;
pub use wal::{Found, Wal, WalOptions, WalPlace, WalStat};
