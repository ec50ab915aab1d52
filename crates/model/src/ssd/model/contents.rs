//! The contents of a modelled drive, by the order that it keeps.

use alloc::vec::Vec;

use riopipe_order::block_device::Cause;
use riopipe_order::write_order::{DriveOrder, WriteOrder};

use crate::probe::{Plant, is_bug_planted};
use crate::ssd::barrier::{self, BarrierStore};
use crate::ssd::op::{self, Ftl, PageState};
use crate::ssd::store::{self, Position, Store};
use crate::ssd::versions::VersionId;
use crate::ssd::{Order, Pages, PowerCut, Profile};

/// The contents of a drive's blocks, and what a power cut may make of them.
pub(super) enum Contents<P: Pages> {
    /// The drive keeps no order.
    Orderless(Store<P>),
    /// The drive has a cache barrier.
    Barrier(BarrierStore<P>),
    /// The drive has an order-preserving FTL.
    Epochs(Ftl<P>),
}

/// The place of a write in flight in the order of the drive.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ticket {
    /// None.
    Orderless,
    /// An epoch of a drive with a cache barrier.
    Barrier(barrier::Epoch),
    /// The epochs of a drive with an order-preserving FTL.
    Epochs(op::Ticket),
}

impl Ticket {
    const fn epoch(self) -> barrier::Epoch {
        match self {
            Self::Barrier(epoch) => epoch,
            Self::Orderless | Self::Epochs(_) => None,
        }
    }

    pub(super) const fn epochs(self) -> Option<op::Ticket> {
        match self {
            Self::Epochs(ticket) => Some(ticket),
            Self::Orderless | Self::Barrier(_) => None,
        }
    }
}

/// A block that a write in flight may have written.
pub(super) struct InFlightBlock<Page> {
    pub(super) lba: u64,
    pub(super) page: Page,
    pub(super) ticket: Ticket,
}

impl<P: Pages> Contents<P> {
    pub(super) fn new(profile: &Profile, order: Order, pages: P, seed: u64) -> Self {
        let max = profile.losable_blocks;
        match order.kind {
            DriveOrder::None => Self::Orderless(Store::new(pages, max)),
            DriveOrder::Barrier => Self::Barrier(BarrierStore::new(pages, max, seed)),
            DriveOrder::Epochs => Self::Epochs(Ftl::new(pages, max, order.tables, seed)),
        }
    }

    pub(super) const fn pages(&self) -> &P {
        match self {
            Self::Orderless(store) => store.pages(),
            Self::Barrier(store) => store.versions().pages(),
            Self::Epochs(ftl) => ftl.versions().pages(),
        }
    }

    pub(super) const fn pages_mut(&mut self) -> &mut P {
        match self {
            Self::Orderless(store) => store.pages_mut(),
            Self::Barrier(store) => store.pages_mut(),
            Self::Epochs(ftl) => ftl.pages_mut(),
        }
    }

    /// The contents of a block before each write that may still be lost, oldest first.
    pub(super) fn older_contents(&self, lba: u64) -> impl Iterator<Item = P::Page> {
        let (orderless, barrier, epochs) = match self {
            Self::Orderless(store) => (Some(store.older_contents(lba)), None, None),
            Self::Barrier(store) => (None, Some(store.versions().older_contents(lba)), None),
            Self::Epochs(ftl) => (None, None, Some(ftl.versions().older_contents(lba))),
        };
        let ordered = barrier.into_iter().flatten().chain(epochs.into_iter().flatten());
        orderless.into_iter().flatten().chain(ordered)
    }

    /// The position that a flush covers if it begins now.
    #[inline]
    pub(super) fn position(&self) -> Position {
        match self {
            Self::Orderless(store) => store.position(),
            Self::Barrier(store) => Position::before(store.versions().next_id()),
            Self::Epochs(ftl) => Position::before(ftl.versions().next_id()),
        }
    }

    /// Makes all writes before `upto` durable, as far as their order allows that.
    pub(super) fn make_durable(&mut self, upto: Position) {
        match self {
            Self::Orderless(store) => store.make_durable(upto),
            Self::Barrier(store) => store.make_durable(upto.next_id()),
            Self::Epochs(ftl) => ftl.program_all(upto.next_id()),
        }
    }

    /// Completes a write. Returns the pages that are not durable although the cache survives a
    /// power cut: their predecessors have not arrived.
    ///
    /// # Errors
    /// The blocks from the failed one on are not written, and their pages are released. The streams
    /// of the write stop.
    #[inline]
    pub(super) fn write(
        &mut self,
        lba: u64,
        pages: &[P::Page],
        ticket: Ticket,
    ) -> Result<Vec<VersionId>, Cause> {
        let mut unmapped = Vec::new();
        let mut written = 0;
        let mut result = match self {
            Self::Barrier(store) if store.is_behind_failure(ticket.epoch()) => {
                Err(Cause::StreamFailed { stream: 0 })
            }
            Self::Orderless(_) | Self::Barrier(_) | Self::Epochs(_) => Ok(()),
        };
        for (lba, page) in (lba..).zip(pages) {
            if result.is_err() {
                self.pages_mut().release(*page);
                continue;
            }
            result = match self {
                Self::Orderless(store) => store.put(lba, *page),
                Self::Barrier(store) => store.put(lba, *page, ticket.epoch()),
                Self::Epochs(ftl) => {
                    ftl.put(lba, *page, ticket.epochs()).map(|id| unmapped.push(id))
                }
            };
            written += u64::from(result.is_ok());
        }
        match (self, &result) {
            (Self::Barrier(store), Err(_)) => store.fail(ticket.epoch()),
            (Self::Epochs(ftl), Err(_)) => {
                if let Some(ticket) = ticket.epochs() {
                    ftl.fail(ticket, pages.len() as u64 - written);
                }
            }
            (Self::Epochs(ftl), Ok(())) => {
                unmapped.retain(|id| !matches!(ftl.state(*id), PageState::Mapped));
                if is_bug_planted(Plant::CompletedUnmapped) {
                    unmapped.clear();
                }
            }
            (Self::Orderless(_) | Self::Barrier(_), _) => {}
        }
        result.map(|()| unmapped)
    }

    /// A write was refused: its streams stop there.
    #[cold]
    pub(super) fn refuse(&mut self, order: WriteOrder) {
        match (self, order) {
            (Self::Epochs(ftl), WriteOrder::Epochs(write)) => ftl.refuse(write),
            (Self::Barrier(store), WriteOrder::Ordered { barrier }) => store.refuse(barrier),
            (Self::Orderless(_) | Self::Barrier(_) | Self::Epochs(_), _) => {}
        }
    }

    /// Loses power while `in_flight` is in flight.
    pub(super) fn power_cut(
        &mut self,
        in_flight: Vec<InFlightBlock<P::Page>>,
        seed: u64,
    ) -> PowerCut {
        let in_flight = in_flight.into_iter();
        match self {
            Self::Orderless(store) => {
                let block = |block: InFlightBlock<P::Page>| store::InFlightBlock {
                    lba: block.lba,
                    page: block.page,
                };
                let in_flight: Vec<_> = in_flight.map(block).collect();
                store.power_cut(&in_flight, seed)
            }
            Self::Barrier(store) => {
                let block = |InFlightBlock { lba, page, ticket }| barrier::InFlightBlock {
                    lba,
                    page,
                    epoch: ticket.epoch(),
                };
                store.power_cut(in_flight.map(block).collect(), seed)
            }
            Self::Epochs(ftl) => {
                let block = |InFlightBlock { lba, page, ticket }| op::InFlightBlock {
                    lba,
                    page,
                    ticket: ticket.epochs(),
                };
                ftl.power_cut(in_flight.map(block).collect(), seed)
            }
        }
    }
}
