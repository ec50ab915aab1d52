//! Features and asynchronous events (Base §5.2, §5.27).

/// Arbitration.
pub const ARBITRATION: u8 = 0x01;
/// Power Management.
pub const POWER_MANAGEMENT: u8 = 0x02;
/// Temperature Threshold.
pub const TEMPERATURE_THRESHOLD: u8 = 0x04;
/// Error Recovery.
pub const ERROR_RECOVERY: u8 = 0x05;
/// Volatile Write Cache; bit 0 of the value: enabled.
pub const VOLATILE_WRITE_CACHE: u8 = 0x06;
/// Number of Queues ([`queues`]).
pub const NUMBER_OF_QUEUES: u8 = 0x07;
/// Interrupt Coalescing; not over fabrics.
pub const INTERRUPT_COALESCING: u8 = 0x08;
/// Interrupt Vector Configuration; not over fabrics.
pub const INTERRUPT_VECTOR: u8 = 0x09;
/// Write Atomicity Normal.
pub const WRITE_ATOMICITY: u8 = 0x0a;
/// Asynchronous Event Configuration ([`event`]).
pub const ASYNC_EVENT_CONFIG: u8 = 0x0b;
/// Timestamp.
pub const TIMESTAMP: u8 = 0x0e;
/// Keep Alive Timer: the timeout in milliseconds.
pub const KEEP_ALIVE_TIMER: u8 = 0x0f;
/// Host Controlled Thermal Management.
pub const THERMAL_MANAGEMENT: u8 = 0x10;
/// Host Behavior Support.
pub const HOST_BEHAVIOR: u8 = 0x16;
/// Host Identifier.
pub const HOST_IDENTIFIER: u8 = 0x81;
/// Reservation Notification Mask.
pub const RESERVATION_MASK: u8 = 0x82;
/// Reservation Persistence; bit 0 of the value: through power loss.
pub const RESERVATION_PERSISTENCE: u8 = 0x83;
/// Namespace Write Protection Configuration.
pub const WRITE_PROTECTION: u8 = 0x84;

/// Value of Number of Queues, requested or granted. Both counts are at least 1, and the field holds
/// one less (Base §5.27.1.5).
#[must_use]
pub const fn queues(submission: u16, completion: u16) -> u32 {
    submission.saturating_sub(1) as u32 | (completion.saturating_sub(1) as u32) << 16
}

/// The content of a value of Number of Queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    /// The number of submission queues, at least 1.
    pub submission: u32,
    /// The number of completion queues, at least 1.
    pub completion: u32,
}

/// The numbers of queues in a value of Number of Queues.
#[must_use]
pub const fn queues_of(value: u32) -> QueueCounts {
    QueueCounts { submission: (value & 0xffff) + 1, completion: (value >> 16) + 1 }
}

/// Asynchronous events (Base §5.2).
pub mod event {
    /// Type of notices.
    pub const NOTICE: u8 = 2;
    /// Type of immediate events, which have no log page and are not masked.
    pub const IMMEDIATE: u8 = 3;
    /// Immediate: the NVM subsystem begins a normal shutdown.
    pub const NORMAL_SHUTDOWN: u8 = 0x00;
    /// Type of events of an I/O command set.
    pub const COMMAND_SET: u8 = 6;
    /// Event of the NVM command set: the log page 80h has a notification.
    pub const RESERVATION_AVAILABLE: u8 = 0x00;
    /// Notice: namespaces were added, removed or changed; the log page is 04h.
    pub const NAMESPACE_CHANGED: u8 = 0x00;
    /// Notice: the ANA state of a group has changed; the log page is 0Ch.
    pub const ANA_CHANGED: u8 = 0x03;
    /// Notice: the discovery log changed; the log page is 70h.
    pub const DISCOVERY_CHANGED: u8 = 0xf0;

    /// Bit of OAES and of the event configuration: notices of namespace changes.
    pub const CONFIG_NAMESPACE: u32 = 1 << 8;
    /// Bit of OAES and of the event configuration: notices of changed ANA states.
    pub const CONFIG_ANA: u32 = 1 << 11;
    /// Bit of OAES and of the event configuration: the subsystem begins a normal shutdown.
    pub const CONFIG_NORMAL_SHUTDOWN: u32 = 1 << 15;
    /// Bit of OAES and of the event configuration: notices of discovery log changes.
    pub const CONFIG_DISCOVERY: u32 = 1 << 31;

    /// Result of an Asynchronous Event Request (dword 0): event type, event information, log page.
    #[must_use]
    pub const fn result(kind: u8, info: u8, log_page: u8) -> u64 {
        (kind & 7) as u64 | (info as u64) << 8 | (log_page as u64) << 16
    }

    /// The fields of a result.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Fields {
        /// Event type, 3 bits.
        pub kind: u8,
        /// Event information.
        pub info: u8,
        /// The log page with the details.
        pub log_page: u8,
    }

    /// The fields of a result.
    #[must_use]
    pub const fn fields(result: u64) -> Fields {
        Fields { kind: result as u8 & 7, info: (result >> 8) as u8, log_page: (result >> 16) as u8 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_counts_are_encoded_less_one() {
        assert_eq!(queues(4, 2), 0x0001_0003);
        assert_eq!(queues_of(0x0001_0003), QueueCounts { submission: 4, completion: 2 });
        assert_eq!(queues_of(0xffff_ffff), QueueCounts { submission: 65536, completion: 65536 });
    }

    #[test]
    fn a_namespace_notice() {
        let r = event::result(event::NOTICE, event::NAMESPACE_CHANGED, 0x04);
        assert_eq!(r, 0x0004_0002);
        let fields = event::Fields { kind: 2, info: 0xf0, log_page: 0x70 };
        assert_eq!(event::fields(0x0070_f002), fields);
    }
}
