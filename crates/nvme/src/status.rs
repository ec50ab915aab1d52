//! Completion status (Base §3.3.3.2.1).

use core::fmt;

/// The 15-bit status field of a completion, without the phase tag.
///
/// Bits 7:0 are the status code (SC), 10:8 its type (SCT), 12:11 the command retry delay, 13 *more*
/// and 14 *do not retry* (DNR).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status(pub u16);

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = ($sct:literal, $sc:literal, $text:literal);)*) => {
        impl Status {
            $(
                #[doc = concat!($text, " (SCT ", $sct, ", SC ", $sc, ").")]
                $(#[$doc])*
                pub const $name: Self = Self::new($sct, $sc);
            )*

            const fn name(self) -> Option<&'static str> {
                $(if self.code() == Self::$name.0 { return Some($text); })*
                None
            }
        }
    };
}

statuses! {
    SUCCESS = (0x0, 0x00, "success");
    INVALID_OPCODE = (0x0, 0x01, "invalid command opcode");
    INVALID_FIELD = (0x0, 0x02, "invalid field in command");
    COMMAND_ID_CONFLICT = (0x0, 0x03, "command id conflict");
    DATA_TRANSFER_ERROR = (0x0, 0x04, "data transfer error");
    POWER_LOSS = (0x0, 0x05, "aborted by power loss");
    INTERNAL = (0x0, 0x06, "internal error");
    ABORT_REQUESTED = (0x0, 0x07, "abort requested");
    QUEUE_DELETED = (0x0, 0x08, "aborted because its queue was deleted");
    FUSED_FAILED = (0x0, 0x09, "failed fused command");
    FUSED_MISSING = (0x0, 0x0a, "missing fused command");
    INVALID_NAMESPACE = (0x0, 0x0b, "invalid namespace or format");
    SEQUENCE_ERROR = (0x0, 0x0c, "command sequence error");
    SGL_SEGMENT_INVALID = (0x0, 0x0d, "invalid SGL segment descriptor");
    SGL_COUNT_INVALID = (0x0, 0x0e, "invalid number of SGL descriptors");
    SGL_LENGTH_INVALID = (0x0, 0x0f, "data SGL length invalid");
    SGL_TYPE_INVALID = (0x0, 0x11, "SGL descriptor type invalid");
    ATOMIC_UNIT_EXCEEDED = (0x0, 0x14, "atomic write unit exceeded");
    OPERATION_DENIED = (0x0, 0x15, "operation denied");
    SGL_OFFSET_INVALID = (0x0, 0x16, "SGL offset invalid");
    HOST_ID_FORMAT = (0x0, 0x18, "host identifier inconsistent format");
    KEEP_ALIVE_EXPIRED = (0x0, 0x19, "keep alive timer expired");
    KEEP_ALIVE_INVALID = (0x0, 0x1a, "keep alive timeout invalid");
    PREEMPTED = (0x0, 0x1b, "aborted by preempt and abort");
    WRITE_PROTECTED = (0x0, 0x20, "namespace is write protected");
    INTERRUPTED = (0x0, 0x21, "command interrupted");
    TRANSIENT_TRANSPORT = (0x0, 0x22, "transient transport error");
    LBA_OUT_OF_RANGE = (0x0, 0x80, "LBA out of range");
    CAPACITY_EXCEEDED = (0x0, 0x81, "capacity exceeded");
    NAMESPACE_NOT_READY = (0x0, 0x82, "namespace not ready");
    RESERVATION_CONFLICT = (0x0, 0x83, "reservation conflict");

    COMPLETION_QUEUE_INVALID = (0x1, 0x00, "completion queue invalid");
    QUEUE_ID_INVALID = (0x1, 0x01, "invalid queue identifier");
    QUEUE_SIZE_INVALID = (0x1, 0x02, "invalid queue size");
    ABORT_LIMIT = (0x1, 0x03, "abort command limit exceeded");
    ASYNC_EVENT_LIMIT = (0x1, 0x05, "asynchronous event request limit exceeded");
    INVALID_LOG_PAGE = (0x1, 0x09, "invalid log page");
    INVALID_FORMAT = (0x1, 0x0a, "invalid format");
    FEATURE_NOT_SAVEABLE = (0x1, 0x0d, "feature identifier not saveable");
    FEATURE_NOT_CHANGEABLE = (0x1, 0x0e, "feature not changeable");
    FEATURE_NOT_NAMESPACE = (0x1, 0x0f, "feature not namespace specific");
    /// Status of a Fabrics command with the same code: [`CONNECT_RESTART_DISCOVERY`](Self::CONNECT_RESTART_DISCOVERY).
    COMMAND_SIZE_LIMIT = (0x1, 0x83, "command size limit exceeded");
    OVERLAPPING_RANGE = (0x1, 0x87, "overlapping I/O range");
    /// Status of Connect and other Fabrics commands.
    CONNECT_FORMAT = (0x1, 0x80, "connect: incompatible format");
    /// Status of Connect and other Fabrics commands.
    CONNECT_BUSY = (0x1, 0x81, "connect: controller busy");
    /// Status of Connect; the result names the field ([`crate::fabrics::connect_invalid`]).
    CONNECT_INVALID = (0x1, 0x82, "connect: invalid parameters");
    /// Status of Connect.
    CONNECT_RESTART_DISCOVERY = (0x1, 0x83, "connect: restart discovery");
    /// Status of Connect.
    CONNECT_INVALID_HOST = (0x1, 0x84, "connect: host not allowed");
    /// Status of Disconnect.
    INVALID_QUEUE_TYPE = (0x1, 0x85, "invalid queue type");
    DISCOVER_RESTART = (0x1, 0x90, "discover: restart");
    AUTHENTICATION_REQUIRED = (0x1, 0x91, "authentication required");

    WRITE_FAULT = (0x2, 0x80, "write fault");
    UNRECOVERED_READ = (0x2, 0x81, "unrecovered read error");
    GUARD_CHECK = (0x2, 0x82, "end-to-end guard check error");
    COMPARE_FAILED = (0x2, 0x85, "compare failure");
    ACCESS_DENIED = (0x2, 0x86, "access denied");

    PATH_INTERNAL = (0x3, 0x00, "internal path error");
    ANA_PERSISTENT_LOSS = (0x3, 0x01, "asymmetric access persistent loss: the port does not reach the namespace any more");
    ANA_INACCESSIBLE = (0x3, 0x02, "asymmetric access inaccessible: the port does not reach the namespace now");
    ANA_TRANSITION = (0x3, 0x03, "asymmetric access transition: the port changes its access to the namespace");
    CONTROLLER_PATHING = (0x3, 0x60, "controller pathing error");
    HOST_PATHING = (0x3, 0x70, "host pathing error");
    ABORTED_BY_HOST = (0x3, 0x71, "command aborted by host");
}

impl Status {
    /// Status code type of generic command status.
    pub const SCT_GENERIC: u8 = 0;
    /// Status code type of command specific status.
    pub const SCT_COMMAND: u8 = 1;
    /// Status code type of media and data integrity errors.
    pub const SCT_MEDIA: u8 = 2;
    /// Status code type of path related status.
    pub const SCT_PATH: u8 = 3;
    /// Status code type of vendor specific status.
    pub const SCT_VENDOR: u8 = 7;

    const MORE: u16 = 1 << 13;
    const DNR: u16 = 1 << 14;

    /// The status of type `sct` (3 bits) with code `sc`.
    #[must_use]
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self(((sct & 7) as u16) << 8 | sc as u16)
    }

    /// The status code.
    #[must_use]
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// The status code type.
    #[must_use]
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Type and code alone, without retry delay, *more* and DNR: the part to compare.
    #[must_use]
    pub const fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// Whether the command succeeded.
    #[must_use]
    #[inline]
    pub const fn is_ok(self) -> bool {
        self.code() == 0
    }

    /// Whether type and code are those of `other`; the other bits are ignored.
    #[must_use]
    pub const fn is(self, other: Self) -> bool {
        self.code() == other.code()
    }

    /// This status with *do not retry* set: the same command would fail again.
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | Self::DNR)
    }

    /// Whether *do not retry* is set.
    #[must_use]
    pub const fn dnr(self) -> bool {
        self.0 & Self::DNR != 0
    }

    /// Whether *more* is set: the error log has an entry about this failure.
    #[must_use]
    pub const fn more(self) -> bool {
        self.0 & Self::MORE != 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name)?,
            None if self.sct() == Self::SCT_VENDOR => f.write_str("vendor specific status")?,
            None => f.write_str("unknown status")?,
        }
        if !self.is_ok() {
            write!(f, " ({:x}/{:02x}h", self.sct(), self.sc())?;
            if self.dnr() {
                f.write_str(", do not retry")?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;

    #[test]
    fn display_gives_name_type_and_code() {
        assert_eq!(format!("{}", Status::SUCCESS), "success");
        assert_eq!(
            format!("{}", Status::LBA_OUT_OF_RANGE.with_dnr()),
            "LBA out of range (0/80h, do not retry)"
        );
        assert_eq!(format!("{}", Status(0x7c1)), "vendor specific status (7/c1h)");
        assert_eq!(Status::WRITE_FAULT.0, 0x280);
        assert!(Status::WRITE_FAULT.with_dnr().is(Status::WRITE_FAULT));
        assert!(Status::SUCCESS.with_dnr().is_ok());
    }
}
