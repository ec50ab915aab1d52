//! The free blocks of the whole file system as numbers, and their reservation.

use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::error::FsError;

/// The claim of an allocation to the last free blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// An allocation for any user. It leaves the blocks that are reserved for root, and those for
    /// [`WriteBack`](Self::WriteBack).
    User,
    /// An allocation for root. It leaves the blocks for [`WriteBack`](Self::WriteBack).
    Root,
    /// Metadata for data that was accepted earlier, such as a node of an extent tree when reserved
    /// pages are written. It may have every free block.
    WriteBack,
}

impl Claim {
    /// The claim of a program's call.
    #[must_use]
    pub const fn of(is_root: bool) -> Self {
        if is_root { Self::Root } else { Self::User }
    }
}

/// The free blocks of the whole file system.
#[derive(Debug)]
pub(super) struct Space {
    /// Blocks that are not in use, blocked ones too.
    free: AtomicU64,
    /// Blocks that are neither in use, nor blocked, nor reserved. It is negative for a while after
    /// reserved blocks were allocated, until their reservation ends.
    unreserved: AtomicI64,
    /// Blocks that a commit in the future lets be allocated again.
    blocked: AtomicU64,
    for_root: i64,
    for_write_back: i64,
}

impl Space {
    /// Space with `free` free blocks of `blocks`, of which `for_root` are reserved for root.
    pub(super) fn new(free: u64, blocks: u64, for_root: u64) -> Self {
        Self {
            free: AtomicU64::new(free),
            unreserved: AtomicI64::new(free.cast_signed()),
            blocked: AtomicU64::new(0),
            for_root: for_root.cast_signed(),
            // As the kernel does it.
            for_write_back: (blocks / 50).min(4096).cast_signed(),
        }
    }

    /// The number of blocks that are not in use, blocked ones too.
    pub(super) fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed)
    }

    /// The number of blocks that are blocked.
    pub(super) fn blocked(&self) -> u64 {
        self.blocked.load(Ordering::Relaxed)
    }

    /// The number of blocks that are neither in use nor reserved, blocked ones too.
    pub(super) fn unreserved(&self) -> u64 {
        let unreserved = self.unreserved.load(Ordering::Relaxed);
        unreserved.saturating_add(self.blocked().cast_signed()).max(0).cast_unsigned()
    }

    /// The blocks that a user can't get.
    pub(super) fn withheld(&self) -> u64 {
        self.floor(Claim::User).cast_unsigned()
    }

    fn floor(&self, claim: Claim) -> i64 {
        match claim {
            Claim::User => self.for_root.saturating_add(self.for_write_back),
            Claim::Root => self.for_write_back,
            Claim::WriteBack => 0,
        }
    }

    /// The right to allocate up to `want` blocks: those that are reserved in any case, and as many
    /// others as there are, down to `least`.
    pub(super) fn take(
        &self,
        want: u32,
        least: u32,
        claim: Claim,
        reserved: u32,
    ) -> Result<u32, FsError> {
        let reserved = reserved.min(want);
        let floor = self.floor(claim);
        let mut unreserved = self.unreserved.load(Ordering::Relaxed);
        loop {
            let others = i64::from(want - reserved).min(unreserved.saturating_sub(floor)).max(0);
            let granted = i64::from(reserved) + others;
            if granted < i64::from(least) {
                return Err(FsError::NoSpace);
            }
            match self.unreserved.compare_exchange_weak(
                unreserved,
                unreserved - granted,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                // It is at most `want`.
                Ok(_) => return Ok(u32::try_from(granted).unwrap_or(want)),
                Err(now) => unreserved = now,
            }
        }
    }

    /// Returns rights that were not used, or ends a reservation.
    pub(super) fn untake(&self, blocks: u64) {
        self.unreserved.fetch_add(blocks.cast_signed(), Ordering::Relaxed);
    }

    /// Blocks were allocated, with rights that were [taken](Self::take).
    pub(super) fn allocated(&self, blocks: u32) {
        self.free.fetch_sub(u64::from(blocks), Ordering::Relaxed);
    }

    /// Blocks were freed, and can be allocated at once.
    pub(super) fn put_back(&self, blocks: u32) {
        self.free.fetch_add(u64::from(blocks), Ordering::Relaxed);
        self.untake(u64::from(blocks));
    }

    /// Blocks were freed and blocked.
    pub(super) fn freed_and_blocked(&self, blocks: u32) {
        self.blocked.fetch_add(u64::from(blocks), Ordering::Relaxed);
        self.free.fetch_add(u64::from(blocks), Ordering::Relaxed);
    }

    /// Free blocks can't be found: their bitmap is damaged.
    pub(super) fn lost(&self, blocks: u32) {
        self.unreserved.fetch_sub(i64::from(blocks), Ordering::Relaxed);
    }

    /// Blocked blocks can be allocated again.
    pub(super) fn unblocked(&self, blocks: u32) {
        self.blocked.fetch_sub(u64::from(blocks), Ordering::Relaxed);
        self.untake(u64::from(blocks));
    }

    /// Particular blocks were set in use: `blocks` that could be allocated, and `blocked` ones.
    pub(super) fn claimed(&self, blocks: u32, blocked: u32) {
        self.free.fetch_sub(u64::from(blocks) + u64::from(blocked), Ordering::Relaxed);
        self.blocked.fetch_sub(u64::from(blocked), Ordering::Relaxed);
        self.unreserved.fetch_sub(i64::from(blocks), Ordering::Relaxed);
    }
}
