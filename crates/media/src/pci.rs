//! PCI devices, as Linux shows them in sysfs.

use std::fmt;
use std::path::{Path, PathBuf};

/// The directory with one directory for each PCI device.
pub(crate) const SYSFS: &str = "/sys/bus/pci/devices";

/// The address of a PCI function: domain, bus, device and function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PciAddress {
    /// As sysfs has it, such as `0000:00:04.0`.
    text: String,
}

impl PciAddress {
    /// Parses an address, such as `0000:00:04.0`. The domain may be left out if it is 0.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no PCI address: write pci:0000:41:00.0 (domain, bus, device and function; \
                 `lspci -D -d ::0108` lists the NVMe drives)"
            )
        };
        let hex = |part: &str, digits: std::ops::RangeInclusive<usize>| {
            let is_hex = part.bytes().all(|byte| byte.is_ascii_hexdigit());
            (is_hex && digits.contains(&part.len())).then(|| u32::from_str_radix(part, 16).ok())?
        };
        let (domain, rest) = match text.matches(':').count() {
            1 => ("0000", text),
            _ => text.split_once(':').ok_or_else(wrong)?,
        };
        let (bus, rest) = rest.split_once(':').ok_or_else(wrong)?;
        let (device, function) = rest.split_once('.').ok_or_else(wrong)?;
        // A domain may have more than 4 digits, as those of Intel's VMD do. A device number has 5
        // bits, a function number 3.
        let parts = (hex(domain, 4..=8), hex(bus, 2..=2), hex(device, 2..=2), hex(function, 1..=1));
        match parts {
            (Some(domain), Some(bus), Some(device @ ..32), Some(function @ ..8)) => {
                Ok(Self { text: format!("{domain:04x}:{bus:02x}:{device:02x}.{function}") })
            }
            _ => Err(wrong()),
        }
    }

    /// The directory of the device below `root` ([`SYSFS`], except in tests).
    pub(crate) fn directory(&self, root: &Path) -> PathBuf {
        root.join(&self.text)
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_sysfs_and_lspci_write_them() {
        for (text, want) in [
            ("0000:00:04.0", "0000:00:04.0"),
            ("41:00.1", "0000:41:00.1"),
            ("0000:E1:1f.7", "0000:e1:1f.7"),
            ("10000:01:00.0", "10000:01:00.0"),
            ("00000001:01:00.0", "0001:01:00.0"),
        ] {
            assert_eq!(PciAddress::parse(text).unwrap().to_string(), want);
        }
    }

    #[test]
    fn t18_what_is_no_address_names_no_file() {
        for text in [
            "",
            "04.0",
            "0000:00:04",
            "0000:00:20.0",
            "0000:00:04.8",
            "0000:00:4.0",
            "0000:100:04.0",
            "0:00:04.0",
            "123456789:00:04.0",
            "0000:00:04.0:1",
            "../0000:00:04.0",
            "0000:00:+4.0",
            "/dev/nvme0",
            "nvme0",
        ] {
            let error = PciAddress::parse(text).unwrap_err();
            assert!(error.contains("lspci"), "{text}: {error}");
        }
    }
}
