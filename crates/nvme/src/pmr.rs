//! A drive's Persistent Memory Region (PMR): persistent memory behind one of the drive's PCI Express
//! base address registers (BARs). A host reads and writes it with loads and stores.
//!
//! The sources are *Base 2.1*, the NVM Express Base Specification, revision 2.1: §8.2.4 for the
//! region, §3.1.4.22 to §3.1.4.24 for its properties.
//!
//! The region has to be enabled before it is used: until then writes change nothing, and reads return
//! any value. [`Enabling`] decides the steps. A store is *posted*: it has left the CPU before it is
//! persistent. [`fence`] makes the stores persistent by the read that the drive asks for, and finds
//! out whether all of them were accepted.

use core::fmt;

/// Offsets of the properties in bytes (Base 2.1 §3.1.4). They are in the drive's BAR 0.
pub mod offset {
    /// Controller Capabilities, 8 bytes (§3.1.4.1).
    pub const CAP: usize = 0x000;
    /// PMR Capabilities, 4 bytes, Figure 58.
    pub const PMRCAP: usize = 0xe00;
    /// PMR Control, 4 bytes, Figure 59.
    pub const PMRCTL: usize = 0xe04;
    /// PMR Status, 4 bytes, Figure 60.
    pub const PMRSTS: usize = 0xe08;
}

/// The value of [`offset::PMRCTL`] that enables the region (EN, bit 0).
pub const PMRCTL_ENABLE: u32 = PMRCTL_EN;

/// PMRCTL.EN, bit 0 (Base 2.1 Figure 59).
const PMRCTL_EN: u32 = 1 << 0;

/// The value that a read returns on PCI Express if no device answers.
const NO_ANSWER: u32 = u32::MAX;

/// The capabilities of a region (Base 2.1 Figure 58).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Number of the BAR with the region: 2 to 5 (BIR, bits 7:5).
    pub bar: u8,
    /// How a host makes its writes persistent (PMRWBM, bits 13:10).
    pub barrier: Barrier,
    /// The time in ms that a host should wait for the region after it has enabled it (PMRTO, bits
    /// 23:16, in the units of PMRTU, bits 9:8).
    pub ready_ms: u32,
}

/// The read that makes all earlier writes to a region persistent (Base 2.1 Figure 58, PMRWBM).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// A read of PMRSTS (PMRWBM bit 1).
    Status,
    /// A read of any address of the region (PMRWBM bit 0). A drive that supports both gets the other
    /// one, because PMRSTS is read in any case.
    Memory,
}

/// Why a drive's region can't be used. The texts name the property and its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PmrError {
    /// CAP.PMRS is 0.
    #[error("the drive has no Persistent Memory Region (CAP.PMRS is 0)")]
    Unsupported,
    /// PMRCAP.BIR is not one of the four valid values.
    #[error(
        "the drive names BAR {0} for its Persistent Memory Region (PMRCAP.BIR): only 2 to 5 are valid"
    )]
    Bar(u8),
    /// PMRCAP.PMRWBM has no known mechanism.
    #[error(
        "the drive has no known way to make writes to its Persistent Memory Region persistent \
         (PMRCAP.PMRWBM is {0:#x})"
    )]
    NoBarrier(u8),
    /// PMRSTS.NRDY stayed 1.
    #[error(
        "the Persistent Memory Region was not ready {waited_ms} ms after it was enabled \
         (PMRSTS.NRDY is 1): the drive may have failed"
    )]
    NotReady {
        /// The time that was waited, in ms.
        waited_ms: u64,
    },
    /// The status does not allow the use of the region.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// A state of a region in which writes are not persistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// All bits of a property are 1: no drive has answered.
    #[error("the drive does not answer: it was removed, has failed, or has no power")]
    Gone,
    /// PMRCTL.EN is 0, or PMRSTS.NRDY is 1.
    #[error(
        "the Persistent Memory Region is not enabled: the drive was reset, or another program has \
         disabled it"
    )]
    Disabled,
    /// PMRSTS.HSTS is neither normal operation nor a restore error.
    #[error("the Persistent Memory Region is {0}")]
    Health(Health),
    /// PMRSTS.ERR is not 0.
    #[error(
        "the drive reports an error of writes to its Persistent Memory Region (PMRSTS.ERR is {0:#04x}). \
         The error stays until the drive's PCI function is reset"
    )]
    Error(u8),
}

/// The health of a region that is ready (PMRSTS.HSTS, bits 11:9, Base 2.1 Figure 60).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It operates normally.
    Normal,
    /// It operates normally, but its content may not be what it was before the last power cycle or
    /// reset.
    RestoreError,
    /// Writes change nothing.
    ReadOnly,
    /// Reads and writes may fail, and the region may have become volatile.
    Unreliable,
    /// A value of a later specification.
    Unknown(u8),
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Normal => f.write_str("normal (PMRSTS.HSTS is 0)"),
            Self::RestoreError => f.write_str("not restored (PMRSTS.HSTS is 1)"),
            Self::ReadOnly => f.write_str("read only (PMRSTS.HSTS is 2)"),
            Self::Unreliable => f.write_str("unreliable (PMRSTS.HSTS is 3)"),
            Self::Unknown(value) => write!(f, "in an unknown state (PMRSTS.HSTS is {value})"),
        }
    }
}

impl Capabilities {
    /// The capabilities in the properties CAP and PMRCAP.
    ///
    /// # Errors
    /// The drive has no region, or one that can't be used.
    pub fn decode(cap: u64, pmrcap: u32) -> Result<Self, PmrError> {
        /// CAP.PMRS, bit 56 (Base 2.1 §3.1.4.1).
        const PMRS: u64 = 1 << 56;
        if cap == u64::MAX || pmrcap == NO_ANSWER {
            return Err(Fault::Gone.into());
        }
        if cap & PMRS == 0 {
            return Err(PmrError::Unsupported);
        }
        let bar = (pmrcap >> 5) as u8 & 0b111;
        if !(2..=5).contains(&bar) {
            return Err(PmrError::Bar(bar));
        }
        let barrier = match (pmrcap >> 10) as u8 & 0b1111 {
            mechanisms if mechanisms & 0b10 != 0 => Barrier::Status,
            mechanisms if mechanisms & 0b01 != 0 => Barrier::Memory,
            mechanisms => return Err(PmrError::NoBarrier(mechanisms)),
        };
        // The unit is 500 ms or, with value 1, a minute. The two other values are reserved: the longer
        // unit is the safe one.
        let unit_ms = if pmrcap >> 8 & 0b11 == 0 { 500 } else { 60_000 };
        let ready_ms = (pmrcap >> 16 & 0xff) * unit_ms;
        Ok(Self { bar, barrier, ready_ms })
    }
}

/// The status of a region (Base 2.1 Figure 60).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Status(u32);

impl Status {
    /// NRDY, bit 8.
    const fn is_ready(self) -> bool {
        self.0 & 1 << 8 == 0
    }

    /// HSTS, bits 11:9.
    const fn health(self) -> Health {
        match self.0 >> 9 & 0b111 {
            0 => Health::Normal,
            1 => Health::RestoreError,
            2 => Health::ReadOnly,
            3 => Health::Unreliable,
            value => Health::Unknown(value as u8),
        }
    }

    /// ERR, bits 7:0. 0: all earlier writes have completed, and are persistent.
    const fn error(self) -> u8 {
        self.0 as u8
    }
}

/// The health of a region whose writes so far are persistent, from PMRSTS and PMRCTL. The status is
/// to be read first: if the region is still enabled after that, it was so at the time of the status.
///
/// # Errors
/// [`Fault`]: some writes may not be persistent.
fn check(pmrsts: u32, pmrctl: u32) -> Result<Health, Fault> {
    let status = Status(pmrsts);
    if pmrsts == NO_ANSWER || pmrctl == NO_ANSWER {
        return Err(Fault::Gone);
    }
    if pmrctl & PMRCTL_EN == 0 || !status.is_ready() {
        return Err(Fault::Disabled);
    }
    match (status.health(), status.error()) {
        (health @ (Health::Normal | Health::RestoreError), 0) => Ok(health),
        (Health::Normal | Health::RestoreError, error) => Err(Fault::Error(error)),
        (health, _) => Err(Fault::Health(health)),
    }
}

/// The next step of enabling a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write [`PMRCTL_ENABLE`] to PMRCTL, and call [`Enabling::step`] again.
    Enable,
    /// Wait some ms, and call [`Enabling::step`] again.
    Wait,
    /// The region may be used. `is_restored`: its content is that of before the last power cycle or
    /// reset. Otherwise it may be any (PMRSTS.HSTS is 1).
    Ready {
        /// Whether the content can be relied on.
        is_restored: bool,
    },
}

/// The enabling of a region (Base 2.1 §8.2.4).
#[derive(Clone, Copy, Debug)]
pub struct Enabling {
    capabilities: Capabilities,
    /// The time of the first step, in ms.
    began_ms: Option<u64>,
    has_enabled: bool,
}

impl Enabling {
    /// Time in ms that a drive gets in addition to what it asks for. Some ask for none.
    const GRACE_MS: u64 = 1000;

    /// The enabling of a region with these capabilities.
    #[must_use]
    pub const fn new(capabilities: Capabilities) -> Self {
        Self { capabilities, began_ms: None, has_enabled: false }
    }

    /// The next step, from PMRSTS and PMRCTL. `now_ms` is a time that never goes back.
    ///
    /// # Errors
    /// The region does not become ready in time, or its status does not allow its use.
    pub fn step(&mut self, pmrsts: u32, pmrctl: u32, now_ms: u64) -> Result<Step, PmrError> {
        let waited_ms = now_ms.saturating_sub(*self.began_ms.get_or_insert(now_ms));
        match check(pmrsts, pmrctl) {
            Ok(health) => Ok(Step::Ready { is_restored: health == Health::Normal }),
            Err(Fault::Disabled) if pmrctl & PMRCTL_EN == 0 && !self.has_enabled => {
                self.has_enabled = true;
                Ok(Step::Enable)
            }
            Err(Fault::Disabled) => {
                if waited_ms > u64::from(self.capabilities.ready_ms) + Self::GRACE_MS {
                    return Err(PmrError::NotReady { waited_ms });
                }
                Ok(Step::Wait)
            }
            Err(fault) => Err(fault.into()),
        }
    }
}

/// A region and its properties. It only carries out effects, and decides nothing.
pub trait Device {
    /// Lets no later access of this CPU overtake an earlier store to the region.
    fn order_stores(&self);

    /// Reads 4 bytes of the property at this [`offset`].
    fn property(&self, offset: usize) -> u32;

    /// Reads any word of the region from the drive.
    fn read_memory(&self);
}

/// Waits until all earlier stores to the region are persistent.
///
/// # Errors
/// [`Fault`]: some of them may not be.
#[inline]
pub fn fence(device: &impl Device, barrier: Barrier) -> Result<(), Fault> {
    device.order_stores();
    if barrier == Barrier::Memory {
        device.read_memory();
    }
    // With `Barrier::Status` this is the barrier. In any case it shows whether the stores were
    // accepted.
    let pmrsts = device.property(offset::PMRSTS);
    // Not before the status: a drive that has been reset meanwhile has dropped stores, although its
    // status is good.
    let pmrctl = device.property(offset::PMRCTL);
    check(pmrsts, pmrctl).map(|_| ())
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;
    use core::cell::RefCell;
    use std::string::ToString;

    use super::*;

    const PMRS: u64 = 1 << 56;
    /// QEMU's emulated drive: BAR 4, a read of PMRSTS, no timeout.
    const QEMU: u32 = 0x0100_0898;
    const EN: u32 = PMRCTL_ENABLE;
    const NRDY: u32 = 1 << 8;

    #[test]
    fn capabilities_have_their_places() {
        let want = Capabilities { bar: 4, barrier: Barrier::Status, ready_ms: 0 };
        assert_eq!(Capabilities::decode(PMRS, QEMU), Ok(want));
        // BAR 2, a read of the memory only, 3 units of 500 ms, of a minute, and of a reserved unit.
        for (unit, ready_ms) in [(0, 1500), (1, 180_000), (2, 180_000), (3, 180_000)] {
            let value = 3 << 16 | 0b01 << 10 | unit << 8 | 2 << 5;
            let want = Capabilities { bar: 2, barrier: Barrier::Memory, ready_ms };
            assert_eq!(Capabilities::decode(PMRS, value), Ok(want));
        }
        // Both reads do: the status is read anyway.
        let both = Capabilities::decode(PMRS, 0b11 << 10 | 5 << 5).unwrap();
        assert_eq!((both.bar, both.barrier), (5, Barrier::Status));
    }

    #[test]
    fn t18_a_region_that_can_not_be_used_is_refused_with_its_field() {
        for (cap, pmrcap, want) in [
            (!PMRS, QEMU, PmrError::Unsupported),
            (0, 0, PmrError::Unsupported),
            (u64::MAX, QEMU, Fault::Gone.into()),
            (PMRS, u32::MAX, Fault::Gone.into()),
            (PMRS, 0b10 << 10, PmrError::Bar(0)),
            (PMRS, 0b10 << 10 | 1 << 5, PmrError::Bar(1)),
            (PMRS, 0b10 << 10 | 6 << 5, PmrError::Bar(6)),
            (PMRS, 0b10 << 10 | 7 << 5, PmrError::Bar(7)),
            (PMRS, 4 << 5, PmrError::NoBarrier(0)),
            (PMRS, 0b1100 << 10 | 4 << 5, PmrError::NoBarrier(12)),
        ] {
            assert_eq!(Capabilities::decode(cap, pmrcap), Err(want), "{cap:x} {pmrcap:x}");
        }
    }

    fn enabling(pmrcap: u32) -> Enabling {
        Enabling::new(Capabilities::decode(PMRS, pmrcap).unwrap())
    }

    #[test]
    fn a_region_is_enabled_and_waited_for() {
        // 2 units of 500 ms.
        let mut enabling = enabling(QEMU | 2 << 16);
        assert_eq!(enabling.step(0, 0, 7000), Ok(Step::Enable));
        assert_eq!(enabling.step(NRDY, EN, 7000), Ok(Step::Wait));
        assert_eq!(enabling.step(NRDY, EN, 9000), Ok(Step::Wait), "its own time, and the grace");
        assert_eq!(enabling.step(0, EN, 9001), Ok(Step::Ready { is_restored: true }));
        assert_eq!(enabling.step(NRDY, EN, 9001), Err(PmrError::NotReady { waited_ms: 2001 }));
    }

    #[test]
    fn a_region_that_is_enabled_is_not_enabled_again_and_a_drive_that_ignores_it_is_given_up() {
        let ready = Ok(Step::Ready { is_restored: true });
        assert_eq!(enabling(QEMU).step(0, EN, 0), ready);
        let mut deaf = enabling(QEMU);
        assert_eq!(deaf.step(NRDY, 0, 0), Ok(Step::Enable));
        assert_eq!(deaf.step(NRDY, 0, 1000), Ok(Step::Wait));
        assert_eq!(deaf.step(NRDY, 0, 1001), Err(PmrError::NotReady { waited_ms: 1001 }));
    }

    #[test]
    fn t24_content_that_was_not_restored_is_reported() {
        assert_eq!(enabling(QEMU).step(1 << 9, EN, 0), Ok(Step::Ready { is_restored: false }));
    }

    /// Each state in which a region is not to be used, as PMRSTS and PMRCTL.
    const FAULTS: [(u32, u32, Fault); 9] = [
        (0, 0, Fault::Disabled),
        (NRDY, EN, Fault::Disabled),
        (u32::MAX, EN, Fault::Gone),
        (0, u32::MAX, Fault::Gone),
        (2 << 9, EN, Fault::Health(Health::ReadOnly)),
        (3 << 9 | 1, EN, Fault::Health(Health::Unreliable)),
        (4 << 9, EN, Fault::Health(Health::Unknown(4))),
        (0x80, EN, Fault::Error(0x80)),
        (1 << 9 | 1, EN, Fault::Error(1)),
    ];

    #[test]
    fn a_status_that_is_not_good_refuses_the_region_at_the_start() {
        for (pmrsts, pmrctl, fault) in FAULTS {
            if fault != Fault::Disabled {
                let error = enabling(QEMU).step(pmrsts, pmrctl, 0).unwrap_err();
                assert_eq!(error, PmrError::Fault(fault));
            }
        }
    }

    #[test]
    fn messages_name_the_field() {
        for (error, parts) in [
            (PmrError::Unsupported, &["CAP.PMRS"][..]),
            (Fault::Health(Health::ReadOnly).into(), &["read only", "PMRSTS.HSTS is 2"]),
            (Fault::Error(0x1f).into(), &["PMRSTS.ERR is 0x1f", "reset"]),
        ] {
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Access {
        Order,
        Memory,
        Property(usize),
    }

    /// A register file that notes each access.
    struct Fake {
        pmrsts: u32,
        pmrctl: u32,
        accesses: RefCell<Vec<Access>>,
    }

    impl Device for Fake {
        fn order_stores(&self) {
            self.accesses.borrow_mut().push(Access::Order);
        }

        fn property(&self, offset: usize) -> u32 {
            self.accesses.borrow_mut().push(Access::Property(offset));
            match offset {
                offset::PMRSTS => self.pmrsts,
                offset::PMRCTL => self.pmrctl,
                _ => panic!("a fence does not need {offset:x}"),
            }
        }

        fn read_memory(&self) {
            self.accesses.borrow_mut().push(Access::Memory);
        }
    }

    fn fenced(pmrsts: u32, pmrctl: u32, barrier: Barrier) -> (Result<(), Fault>, Vec<Access>) {
        let device = Fake { pmrsts, pmrctl, accesses: RefCell::default() };
        let result = fence(&device, barrier);
        (result, device.accesses.into_inner())
    }

    #[test]
    fn t7_a_fence_is_the_read_that_the_drive_asks_for_after_all_stores() {
        use Access::{Memory, Order, Property};
        let status = [Property(offset::PMRSTS), Property(offset::PMRCTL)];
        let (result, accesses) = fenced(0, EN, Barrier::Status);
        assert_eq!((result, accesses), (Ok(()), vec![Order, status[0], status[1]]));
        let (result, accesses) = fenced(0, EN, Barrier::Memory);
        assert_eq!((result, accesses), (Ok(()), vec![Order, Memory, status[0], status[1]]));
    }

    #[test]
    fn p6_a_fence_fails_with_the_status() {
        for barrier in [Barrier::Status, Barrier::Memory] {
            for (pmrsts, pmrctl, fault) in FAULTS {
                assert_eq!(fenced(pmrsts, pmrctl, barrier).0, Err(fault), "{pmrsts:x} {pmrctl:x}");
            }
            // It works, and what is stored from now on is persistent.
            assert_eq!(fenced(1 << 9, EN, barrier).0, Ok(()));
        }
    }
}
