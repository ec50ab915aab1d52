//! An object store of transactions, on two ordered streams of a volume.
//!
//! A [`Transaction`] changes named objects: it puts whole objects, overwrites ranges, and removes
//! objects. [`Store::queue_transaction`] only orders it: after a crash it is there only if all
//! earlier transactions of the store are. [`Store::apply_transaction`] also waits until it is
//! durable. Each transaction is there wholly or not at all.
//!
//! ```no_run
//! use riopipe::{OpenOptions, Volume};
//! use riopipe_store::{Store, StoreOptions, StorePlace, Transaction};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let members = ["10.0.0.1:4420".parse()?];
//! let (volume, recovery) = Volume::open("objects", &members, &OpenOptions::default())?;
//! let place = StorePlace {
//!     log_stream: 0,
//!     log_lba: 0,
//!     log_blocks: 65_536,
//!     data_stream: 1,
//!     data_lba: 65_536,
//!     data_blocks: volume.blocks() - 65_536,
//! };
//! let store = Store::open(&volume, &recovery, place, &StoreOptions::default())?;
//! store.queue_transaction(Transaction::new().put("a", b"first"))?; // returns at once
//! store.apply_transaction(Transaction::new().write("a", 5, b", second"), None)?; // both are durable
//! assert_eq!(store.get("a")?, b"first, second");
//! store.close(None)?;
//! # Ok(())
//! # }
//! ```
//!
//! # How it works
//!
//! The log is a [`Wal`](riopipe_wal::Wal) with one record for each transaction. Short content is in
//! the record, and is written to its own blocks before the next checkpoint. Long content is written
//! to fresh blocks of the data stream, and the record is appended only when it is durable there:
//! two streams have no order. Meanwhile the transaction and all later ones are in the *ordering
//! queue*, in memory. A thread of the store moves it on; no caller waits for it.
//!
//! `docs/store.md` has the whole path, the costs, and the differences from HORAE's HoraeStore.

extern crate alloc;

mod error;
mod orderer;
mod shared;
mod state;
mod store;

pub use error::{
    ApplyError, CreateError, OpenError, PlaceError, ReadError, StoreFailure, TransactionError,
    WaitError,
};
pub use shared::Ticket;
pub use store::{Store, StoreOptions, StorePlace, StoreStat, Transaction};

/// The longest name of an object, in bytes.
pub const NAME_BYTES_MAX: usize = state::NAME_BYTES_MAX;
